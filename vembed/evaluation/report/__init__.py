"""The report of a run: its record, plots and pages."""
