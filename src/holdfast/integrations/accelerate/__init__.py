"""Hugging Face accelerate: `AccelerateCheckpointer` for a training loop, `attach` for `save_state` and `load_state`."""

from holdfast.integrations.accelerate.accelerate_checkpointer import AccelerateCheckpointer
from holdfast.integrations.accelerate.state_folders import StateFolders, attach

__all__ = ["AccelerateCheckpointer", "StateFolders", "attach"]
