"""Data: from files to padded tensors, by way of records, batches, micro-batches and features."""
