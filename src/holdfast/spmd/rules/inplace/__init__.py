"""In-place operators on a Partial."""
