"""The mapping that a conversion was told to use: a file of statements, or a built-in one by name."""
