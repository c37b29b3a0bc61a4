"""Poolings: from the vectors of tokens to one embedding."""
