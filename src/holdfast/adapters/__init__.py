"""Live objects and layouts: modules, optimizers, stateful objects, tensors. Imports torch."""
