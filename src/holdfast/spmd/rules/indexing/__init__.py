"""Indexing and masks: x[i], x[mask], x[i] = v, index_put, index_add."""
