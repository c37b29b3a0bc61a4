"""Readers: one file for each format of data."""
