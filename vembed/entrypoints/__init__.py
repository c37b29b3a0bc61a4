"""What accelerate launch, torchrun and python -m start."""
