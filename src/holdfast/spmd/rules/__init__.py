"""Rules stated as dims and reductions, one file per family."""
