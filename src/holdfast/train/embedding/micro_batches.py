"""Parts of a column of inputs that the model encodes at once: so many rows, or rows with so many tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument

MASK = "attention_mask"


def row_count(column: Any) -> int:
    """Return the rows of a column: a tensor, a dict of tensors as a tokenizer returns it, or a list of inputs."""
    if not isinstance(column, Mapping):
        return len(column)
    counts = {name: len(value) for name, value in column.items() if isinstance(value, torch.Tensor) and value.dim()}
    if len(set(counts.values())) != 1:
        raise InvalidArgument(f"the tensors of an input have different numbers of rows: {counts or 'none has any'}")
    return next(iter(counts.values()))


def take_rows(column: Any, begin: int, end: int, *, trim: bool = False) -> Any:
    """Return some rows of a column; with `trim` without the padding that follows the longest of them."""
    if isinstance(column, Mapping):
        taken = {
            name: value[begin:end] if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in column.items()
        }
        return _trimmed(taken) if trim else taken
    return column[begin:end]


def row_ranges(column: Any, micro_batch: int, micro_tokens: int | None) -> list[tuple[int, int]]:
    """Divide the rows of a column, in their order, into parts of `micro_batch` rows or at most `micro_tokens` tokens.

    A row with more tokens than that has a part of its own.
    """
    rows = row_count(column)
    if micro_tokens is None:
        return [(begin, min(begin + micro_batch, rows)) for begin in range(0, rows, micro_batch)]
    ranges = []
    begin = tokens = 0
    for row, length in enumerate(_lengths(column)):
        if row > begin and tokens + length > micro_tokens:
            ranges.append((begin, row))
            begin, tokens = row, 0
        tokens += length
    return [*ranges, (begin, rows)] if rows else []


def _lengths(column: Any) -> list[int]:
    mask = column.get(MASK) if isinstance(column, Mapping) else None
    if not isinstance(mask, torch.Tensor):
        raise InvalidArgument(f"micro_tokens counts the tokens of {MASK!r}, which the inputs lack: use micro_batch")
    return [int(length) for length in mask.long().sum(1).tolist()]


def _trimmed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Cut the positions at the end that are padding in every row."""
    mask = inputs.get(MASK)
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return inputs
    used = mask.bool().any(0).nonzero()
    length = int(used.max()) + 1 if len(used) else mask.shape[1]
    return {
        name: value[:, :length]
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == mask.shape[1]
        else value
        for name, value in inputs.items()
    }
