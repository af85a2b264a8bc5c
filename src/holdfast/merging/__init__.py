"""Merging of models: tensors of several checkpoints stream in, chunk by chunk, and one model streams out."""
