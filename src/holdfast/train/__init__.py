"""A readable trainer on PyTorch's own parallelism, whose runs resume on any other layout."""
