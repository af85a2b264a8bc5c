"""Initial values by key and seed, the same on every layout: a rank fills its part of the whole tensor."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from holdfast.adapters.tensors import holder_of, part_view
from holdfast.layout.box import Box
from holdfast.train.models.config import ModelConfig


def fill_initial(module: nn.Module, config: ModelConfig, seed: int, aliases: dict[str, str]) -> None:
    """Fill every parameter that this rank has. Only one whole tensor exists at a time.

    `aliases` names the key whose values a tied parameter has.
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
