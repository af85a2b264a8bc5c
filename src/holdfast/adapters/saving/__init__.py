"""From live objects to the tensors and values of a save."""
