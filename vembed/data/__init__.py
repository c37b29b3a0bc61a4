"""From files to padded tensors: records, batches, micro-batches, features."""
