"""Hugging Face Trainer and TRL: `attach(trainer)`, then `trainer.train(resume_from_checkpoint=True)`.

Saves go through `holdfast.Checkpointer`, and a restart goes on exactly where the newest step was saved.
The first start takes the same command line: without a step yet, training begins at 0.
"""

from __future__ import annotations

from holdfast.integrations.transformers.attach import attach
from holdfast.integrations.transformers.mixin import HoldfastMixin

__all__ = ["HoldfastMixin", "attach"]
