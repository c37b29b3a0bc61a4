"""Data engine: hard negatives found, judged and chosen; data audited; pairs made from documents."""
