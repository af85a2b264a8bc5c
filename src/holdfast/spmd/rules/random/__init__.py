"""Random numbers on CPU meshes."""
