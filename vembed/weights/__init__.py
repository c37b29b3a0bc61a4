"""Weights of finished models: merged, edited and inspected, shard by shard."""
