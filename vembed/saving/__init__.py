"""Saved models: the Sentence Transformers layout and the model card."""
