"""From embeddings to a loss. Nothing in here communicates."""
