"""Checks of how the code reads: unique nouns, phrases to avoid, and the length of files. `make check` runs them."""
