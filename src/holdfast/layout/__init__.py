"""Layouts of tensors over ranks: boxes, meshes, placements, flat ranges. Pure values."""
