"""Distributed runs: launch, process group, collectives, strategy and FSDP."""
