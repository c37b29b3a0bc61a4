"""Batches: which examples come together, and the tensors of their micro-batches."""
