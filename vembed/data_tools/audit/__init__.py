"""Audit of training data."""
