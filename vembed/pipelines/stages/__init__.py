"""Stages: the steps of one config, run in order, each once."""
