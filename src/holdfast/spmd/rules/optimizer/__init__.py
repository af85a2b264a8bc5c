"""Fused optimizer steps and lists of tensors."""
