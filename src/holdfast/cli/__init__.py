"""The command line. Commands that only inspect checkpoints never import torch."""
