"""A DTensor read as a Python number."""
