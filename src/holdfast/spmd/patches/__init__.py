"""Replacements for functions and methods of torch that run before DTensor's dispatcher."""
