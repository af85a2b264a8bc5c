"""Trees of foreign values: classified, grouped, and laid out as stored blocks."""
