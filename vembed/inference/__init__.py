"""Inference: encoding of items outside a training step, and the Embedder for users."""
