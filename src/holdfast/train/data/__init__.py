"""Datasets, and the micro batches that every rank reads from them."""
