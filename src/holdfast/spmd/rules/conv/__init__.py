"""Convolutions, transposed ones included."""
