"""The training run. Start with trainer.py."""
