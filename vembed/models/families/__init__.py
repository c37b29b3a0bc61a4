"""Model families: what a model is, decided from its config and small files before any weights are read."""
