"""Checks of a machine and a root before a run: memory, page-locking, file system, torch, GPUs, clock."""
