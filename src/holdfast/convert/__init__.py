"""Offline conversion of checkpoints between formats, key names, shapes and dtypes, streamed block by block."""
