"""Collect the tensors and values to save from live objects."""
