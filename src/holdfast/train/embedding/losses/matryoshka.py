"""Matryoshka: a loss over the first numbers of each embedding, for several lengths at once (Kusupati et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import Columns


class Matryoshka(nn.Module):
    """The weighted sum of a loss over embeddings that are cut to each of some dims and normalized again.

    Args:
        loss: A loss of this package, or another that takes `Columns`.
        dims: Lengths of embeddings; usually the whole one is among them.
        weights: One for each of `dims`; 1 for all by default.
    """

    def __init__(
        self, loss: Callable[..., torch.Tensor], dims: Sequence[int], weights: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        if not dims or any(isinstance(dim, bool) or not isinstance(dim, int) or dim < 1 for dim in dims):
            raise InvalidArgument(f"dims={list(dims)}: give integers of at least 1")
        if weights is not None and len(weights) != len(dims):
            raise InvalidArgument(f"there are {len(weights)} weights for {len(dims)} dims")
        self.loss = loss
        self.dims, self.weights = tuple(dims), tuple(weights or [1.0] * len(dims))

    def forward(self, columns: Columns, **extras: Any) -> torch.Tensor:
        width = columns.own[0].shape[1]
        if max(self.dims) > width:
            raise InvalidArgument(f"dims has {max(self.dims)}, and the embeddings have {width} numbers")
        shares = [
            weight * self.loss(_cut(columns, dim, width), **extras)
            for dim, weight in zip(self.dims, self.weights, strict=True)
        ]
        return torch.stack(shares).sum()


def _cut(columns: Columns, dim: int, width: int) -> Columns:
    if dim == width:
        return columns
    own, every = (
        tuple(functional.normalize(column[:, :dim], dim=-1) for column in found)
        for found in (columns.own, columns.every)
    )
    return replace(columns, own=own, every=every)
