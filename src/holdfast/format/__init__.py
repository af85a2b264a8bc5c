"""The bytes of a checkpoint: headers, index, manifest, state.json, digests. No files, no tensors."""
