"""Publication on the Hub: what of a run is published, and its upload."""
