"""Processes: how they start, share a model, talk and end."""
