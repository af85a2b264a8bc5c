"""The version of Holdfast, written into every manifest."""

__version__ = "0.1.0"
