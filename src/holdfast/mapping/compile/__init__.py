"""Compile statements for single keys into recipes over the sources."""
