"""Export of models into the formats of other runtimes, each compared with the model."""
