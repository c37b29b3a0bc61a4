"""Entry points for accelerate launch, torchrun and `python -m`."""
