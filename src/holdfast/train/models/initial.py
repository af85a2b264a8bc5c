"""Initial values by key and seed, the same on every layout: each rank fills its shards of the full tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from holdfast.adapters.tensors import holder_of, part_view
from holdfast.layout.box import Box
from holdfast.train.models.model_config import ModelConfig


def fill_initial(module: nn.Module, config: ModelConfig, seed: int, aliases: dict[str, str]) -> None:
    """Fill every parameter of this rank. Only one full tensor exists at a time.

    `aliases` maps a tied parameter to the key whose values it takes.
    """
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            holder = holder_of(parameter, key)
            whole = _whole(aliases.get(key, key), holder.shape, config, seed)
            for part in holder.parts:
                part_view(holder, part).copy_(whole[part.box.within(Box.full(holder.shape))])


def _whole(key: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> torch.Tensor:
    if key.endswith("norm.weight"):
        return torch.ones(shape)
    if key.endswith(".bias"):
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"{seed}:{key}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    return torch.randn(shape, generator=generator) * config.initializer_range
