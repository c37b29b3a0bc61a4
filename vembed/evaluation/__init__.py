"""Evaluation: data, full-corpus retrieval and similarity scores."""
