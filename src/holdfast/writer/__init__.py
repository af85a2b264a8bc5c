"""The writer process, one per rank: from the arena to storage. Never imports torch."""
