"""Scaled dot product attention on CPUs."""
