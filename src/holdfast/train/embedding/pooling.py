"""From the hidden states of tokens to the vector of a text, for inputs that are padded on the right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from holdfast.train.embedding.micro_batches import MASK


def pad_right(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Move the padding of every row behind its tokens, in all tensors of [rows, length].

    The positions of tokens then do not depend on the padding, and causal attention needs no mask.
    """
    mask = inputs[MASK].bool()
    order = mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    return {
        name: value.gather(1, order) if isinstance(value, torch.Tensor) and value.shape == mask.shape else value
        for name, value in inputs.items()
    }


def pool(
    hidden: torch.Tensor, mask: torch.Tensor, pooling: str, excluded: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Return a vector for each row of [rows, length, width].

    Args:
        hidden: The hidden states of tokens, which padding follows.
        mask: Which of them are tokens, [rows, length].
        pooling: "lasttoken", "mean" or "cls".
        excluded: Tokens at the beginning of each row that do not take part: the length of a prompt.

    A row of which nothing is left gets zeros, except for "cls", which takes its first token.
    """
    positions = torch.arange(mask.shape[1], device=mask.device)
    lengths = mask.sum(1, keepdim=True)
    begins = torch.zeros_like(lengths) if excluded is None else _column(excluded, lengths)
    if pooling == "mean":
        chosen = ((positions >= begins) & (positions < lengths)).unsqueeze(2)
        wide = torch.float32 if hidden.dtype in (torch.float16, torch.bfloat16) else hidden.dtype
        sums = (hidden * chosen).sum(1, dtype=wide)
        return (sums / chosen.sum(1).clamp(min=1)).to(hidden.dtype)
    empty = begins >= lengths
    if pooling == "cls":
        return _at(hidden, begins.masked_fill(empty, 0))
    return _at(hidden, (lengths - 1).clamp(min=0)).masked_fill(empty, 0.0)


def unit_vectors(vectors: torch.Tensor) -> torch.Tensor:
    return functional.normalize(vectors, dim=1)


def _at(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the hidden state of one position of each row."""
    return hidden.gather(1, positions.unsqueeze(2).expand(-1, 1, hidden.shape[2])).squeeze(1)


def _column(counts: torch.Tensor | int, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(counts, device=like.device, dtype=like.dtype).reshape(-1, 1).expand_as(like)
