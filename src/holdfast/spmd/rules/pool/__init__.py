"""Pooling of images."""
