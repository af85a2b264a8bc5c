"""Files of torch.save, read without torch and without running what is in them."""
