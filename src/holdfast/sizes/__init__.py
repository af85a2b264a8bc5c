"""Sizes of a training run ahead of it: memory of every rank, files of a checkpoint, memory of a save and a load."""
