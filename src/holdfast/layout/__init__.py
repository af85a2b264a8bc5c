"""Layouts of tensors over ranks: boxes, meshes, placements, coordinates. Pure values."""
