"""Own models: a module of the user's code as backbone, and the wrapper that makes it a model of Transformers."""
