"""The engine between memory and storage: gathering blocks, writing, publishing, reading."""
