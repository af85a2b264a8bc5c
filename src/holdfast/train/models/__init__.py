"""Decoders with Hugging Face's key names: dense and mixture of experts."""
