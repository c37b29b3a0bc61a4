"""Optimizers: one class in one file for each, listed in `table.py`."""
