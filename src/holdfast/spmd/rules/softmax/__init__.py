"""softmax and log_softmax."""
