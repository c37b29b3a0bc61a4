"""The run: start with run.py."""
