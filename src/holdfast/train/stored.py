"""How the trainer's parameters are called on disk: as Hugging Face stores them, one key per expert."""

from __future__ import annotations

from holdfast.train.models.config import ModelConfig

_EXPERTS = """
# In memory a layer's experts are stacked, gate above up; on disk each has its own keys and global number.
model.layers.$LAYER_ID.mlp.experts.gate_up_proj -> gate.$LAYER_ID, up.$LAYER_ID, axis=1
gate.$LAYER_ID -> model.layers.$LAYER_ID.mlp.experts.*.gate_proj.weight, axis=0, stack
up.$LAYER_ID -> model.layers.$LAYER_ID.mlp.experts.*.up_proj.weight, axis=0, stack
model.layers.$LAYER_ID.mlp.experts.down_proj -> model.layers.$LAYER_ID.mlp.experts.*.down_proj.weight, axis=0, stack
"""


def save_mapping(config: ModelConfig) -> str | None:
    """Statements from live to stored tensors; None where the names are the same."""
    return _EXPERTS.lstrip() if config.traits.experts else None
