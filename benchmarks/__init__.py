"""Comparisons with other libraries, and growth of time and memory. Not part of the package."""
