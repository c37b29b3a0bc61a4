"""Using and judging a model: encoding, retrieval metrics, reports."""
