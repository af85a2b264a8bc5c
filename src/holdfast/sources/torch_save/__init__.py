"""Read torch.save files without torch and without executing their pickles."""
