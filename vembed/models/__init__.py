"""Embedding models: building from a description, and the forward pass."""
