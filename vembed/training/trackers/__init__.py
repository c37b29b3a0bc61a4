"""Trackers: services and files that get the metrics of a run."""
