"""Inference and evaluation: encoding, retrieval metrics, reports."""
