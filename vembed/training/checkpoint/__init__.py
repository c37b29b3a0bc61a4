"""Checkpoints: writing, reading, their schema and integrity, and what a resumed run may change."""
