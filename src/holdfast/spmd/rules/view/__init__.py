"""Reshapes, slices, diagonals and in-place transposes."""
