"""From statements for single keys to recipes over the sources."""
