"""Live objects and their layouts: modules, optimizers, stateful objects, tensors. Imports torch."""
