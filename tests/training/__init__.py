"""Tests of vembed.training."""
