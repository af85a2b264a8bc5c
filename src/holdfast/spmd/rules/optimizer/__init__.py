"""Fused optimizer steps and `torch._foreach_*` lists of tensors."""
