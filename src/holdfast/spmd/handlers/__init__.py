"""Rules that must know the rank, or that change the arguments: one file per family."""
