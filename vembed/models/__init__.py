"""Embedding models: description, backbones, pooling, heads, adapters and the saved model."""
