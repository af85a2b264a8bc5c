"""The text of a mapping program: tokens, grammar, statements and their checks."""
