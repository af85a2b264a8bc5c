"""Operators that treat the items of a batch one by one: padding, sampling, stacks of matrices."""
