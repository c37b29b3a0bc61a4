"""Loss functions over the embeddings of one global batch. No code in this package communicates between ranks."""
