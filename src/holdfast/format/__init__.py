"""Byte formats of a checkpoint: headers, index, manifest, state.json, dtypes, digests. No file access, no tensors."""
