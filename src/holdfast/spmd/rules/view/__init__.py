"""Reshapes, slices, diagonals, complex views and in-place transposes."""
