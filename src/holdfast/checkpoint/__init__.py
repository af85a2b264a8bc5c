"""An open checkpoint and a root of checkpoints: reading, writing, committing and retention. Never imports torch."""
