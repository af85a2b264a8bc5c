"""Capture: copy live tensors into arenas of shared memory without stopping training."""
