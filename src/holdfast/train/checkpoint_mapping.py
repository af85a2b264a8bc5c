"""The trainer's mappings between live keys with stacked experts and Hugging Face's keys, one per expert."""

from __future__ import annotations

from holdfast.mapping.program import Mapping
from holdfast.train.models.model_config import ModelConfig

_EXPERTS = """
# In memory a layer's experts are stacked, gate above up; on disk each has its own keys and global number.
model.layers.$LAYER_ID.mlp.experts.gate_up_proj -> gate_up.$LAYER_ID.*, axis=0, stack
gate_up.$LAYER_ID.$EXPERT_ID -> model.layers.$LAYER_ID.mlp.experts.$EXPERT_ID.gate_proj.weight,
    model.layers.$LAYER_ID.mlp.experts.$EXPERT_ID.up_proj.weight, axis=0
model.layers.$LAYER_ID.mlp.experts.down_proj -> model.layers.$LAYER_ID.mlp.experts.*.down_proj.weight, axis=0, stack
"""


def save_mapping(config: ModelConfig) -> Mapping | None:
    """Return the mapping from live to stored tensors, for `Checkpointer`; None if the names are the same."""
    return Mapping.parse(_EXPERTS.strip()) if config.traits.experts else None


def load_mapping(config: ModelConfig) -> Mapping | None:
    """Return the mapping from stored to live tensors, for `holdfast.load` of a checkpoint or Hugging Face folder."""
    saved = save_mapping(config)
    return None if saved is None else saved.reverse()
