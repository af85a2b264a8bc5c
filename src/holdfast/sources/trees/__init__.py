"""Trees of foreign values: classify them, group them, and locate them in stored blocks."""
