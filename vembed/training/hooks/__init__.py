"""Additions to the training loop: one file per family of hooks."""
