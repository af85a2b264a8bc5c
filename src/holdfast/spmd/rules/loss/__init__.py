"""Losses and their means."""
