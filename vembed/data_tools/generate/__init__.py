"""Training pairs from documents."""
