"""From statements with wildcards to statements for single keys."""
