"""Offline conversion: tensors stream in, tensors stream out."""
