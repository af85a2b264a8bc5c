"""From the tensors and values of a checkpoint to live objects."""
