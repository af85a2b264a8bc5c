"""An open checkpoint and a root of them: reading, writing, commit, retention, shared memory. Never imports torch."""
