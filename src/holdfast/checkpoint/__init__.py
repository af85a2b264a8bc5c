"""An open checkpoint, and a root of checkpoints: reading, writing, committing, retention. Never imports torch."""
