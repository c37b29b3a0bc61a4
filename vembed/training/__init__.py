"""The training run. Start with run.py."""
