"""Who holds which part of a tensor: boxes, meshes, placements, flat ranges. Pure values."""
