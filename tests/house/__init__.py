"""Checks of how the code reads, and of what tests and documents claim. `make check` runs them."""
