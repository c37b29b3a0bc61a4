"""From tensors to embeddings: backbones, pooling, heads, adapters, and the saved model."""
