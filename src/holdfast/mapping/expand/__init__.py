"""Expand statements with wildcards into statements for single keys."""
