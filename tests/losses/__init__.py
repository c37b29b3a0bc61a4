"""Tests of the losses against a reference written from the formulas."""
