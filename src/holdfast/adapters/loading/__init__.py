"""Load the tensors and values of a checkpoint into live objects."""
