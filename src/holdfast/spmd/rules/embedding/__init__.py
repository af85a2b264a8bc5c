"""Embedding lookups and their gradients."""
