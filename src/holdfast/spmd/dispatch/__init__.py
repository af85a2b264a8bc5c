"""The path of a call that DTensor's dispatch cache does not answer."""
