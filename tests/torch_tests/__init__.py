"""torch's own DTensor tests with and without holdfast.spmd: `python -m tests.torch_tests`."""
