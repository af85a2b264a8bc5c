"""A readable hybrid-parallel trainer on PyTorch's own parallelism, whose runs resume exactly on any layout."""
