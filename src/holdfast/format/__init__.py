"""The byte formats of a checkpoint: headers, index, manifest, state.json, digests. No file access, no tensors."""
