"""Parts of a column of inputs that the model encodes at once: rows of similar length, so that little is padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument

MASK = "attention_mask"


@dataclass(frozen=True, slots=True)
class Division:
    """How columns are divided: `micro_batch` rows, or rows that have `micro_tokens` tokens when they are padded.

    A row with more tokens than that has a part of its own. `trim` cuts the padding that follows the longest row of a
    part. `sort` puts rows of similar length together, the longest first, so that a lack of memory shows at once.
    """

    micro_batch: int = 32
    micro_tokens: int | None = None
    trim: bool = True
    sort: bool = False

    def __post_init__(self) -> None:
        for name, value in (("micro_batch", self.micro_batch), ("micro_tokens", self.micro_tokens)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidArgument(f"{name}={value!r} must be an integer of at least 1")

    def divide(self, column: Any) -> DividedColumn:
        """Return the parts of a column."""
        lengths = _lengths(column)
        order = None
        if self.sort and lengths is not None:
            order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)  # equal lengths stay in order
            column, lengths = _reordered(column, order), [lengths[row] for row in order]
        ranges = self._ranges(column, lengths)
        inputs = [
            take_rows(column, begin, end, max(lengths[begin:end]) if self.trim and lengths else None)
            for begin, end in ranges
        ]
        return DividedColumn(inputs, [end - begin for begin, end in ranges], order)

    def _ranges(self, column: Any, lengths: Sequence[int] | None) -> list[tuple[int, int]]:
        rows = row_count(column)
        if self.micro_tokens is None:
            return [(begin, min(begin + self.micro_batch, rows)) for begin in range(0, rows, self.micro_batch)]
        if lengths is None:
            raise InvalidArgument(f"micro_tokens counts the tokens of {MASK!r}, which the inputs lack: use micro_batch")
        widths = lengths if self.trim else [column[MASK].shape[1]] * rows
        ranges = []
        begin = longest = 0
        for row, width in enumerate(widths):
            longest = max(longest, width)
            if row > begin and (row + 1 - begin) * longest > self.micro_tokens:
                ranges.append((begin, row))
                begin, longest = row, width
        return [*ranges, (begin, rows)] if rows else []


@dataclass(frozen=True, slots=True)
class DividedColumn:
    """The parts of a column, the rows of each, and the order of the rows in them if it is not their own."""

    inputs: list[Any]
    sizes: list[int]
    order: list[int] | None

    def join(self, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the embeddings of all parts in the order of the column's rows."""
        for embedding, rows in zip(embeddings, self.sizes, strict=True):
            if embedding.dim() != 2 or embedding.shape[0] != rows:
                raise InvalidArgument(f"encode returned {list(embedding.shape)} for {rows} rows; expected [rows, dim]")
        joined = torch.cat(list(embeddings))
        if self.order is None:
            return joined
        return joined[torch.tensor(self.order, device=joined.device).argsort()]


def row_count(column: Any) -> int:
    """Return the rows of a column: a tensor, a dict of tensors as a tokenizer returns it, or a list of inputs."""
    if not isinstance(column, Mapping):
        return len(column)
    counts = {name: len(value) for name, value in column.items() if isinstance(value, torch.Tensor) and value.dim()}
    if len(set(counts.values())) != 1:
        if not counts:
            raise InvalidArgument("an input has no tensor with rows: tokenize with return_tensors='pt'")
        raise InvalidArgument(f"the tensors of an input have different numbers of rows: {counts}")
    return next(iter(counts.values()))


def take_rows(column: Any, begin: int, end: int, length: int | None = None) -> Any:
    """Return some rows of a column, and of these the first `length` positions."""
    if not isinstance(column, Mapping):
        return column[begin:end]
    taken = {
        name: value[begin:end] if isinstance(value, torch.Tensor) and value.dim() else value
        for name, value in column.items()
    }
    return taken if length is None else _trimmed(taken, max(length, 1))


def _reordered(column: Mapping[str, Any], order: list[int]) -> dict[str, Any]:
    return {
        name: value[torch.tensor(order, device=value.device)]
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in column.items()
    }


def _lengths(column: Any) -> list[int] | None:
    """Return for each row the positions up to its last token; None without a mask."""
    mask = column.get(MASK) if isinstance(column, Mapping) else None
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return None
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    found: list[int] = (mask.bool() * positions).amax(1).tolist() if mask.numel() else [0] * len(mask)
    return found


def _trimmed(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """Cut the positions after `length` in every tensor that has as many as the mask."""
    width = inputs[MASK].shape[1]
    return {
        name: value[:, :length]
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == width
        else value
        for name, value in inputs.items()
    }
