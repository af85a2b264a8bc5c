"""Good inputs that torch wrote, kept as files so that the fuzzer starts without torch.

`python -m tests.fuzz.seeds` writes them anew.
"""
