"""The demo: train, kill a rank, resume on another layout, open with transformers."""
