"""Operators that work along one dim: gather, scatter, sort, topk, unfold, cat, flip, roll, searchsorted, renorm."""
