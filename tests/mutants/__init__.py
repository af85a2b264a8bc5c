"""Mutation runs: change one thing in a package, and see whether a test notices. `make mutants` runs them."""
