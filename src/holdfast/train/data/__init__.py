"""From datasets to the micro batches of every rank."""
