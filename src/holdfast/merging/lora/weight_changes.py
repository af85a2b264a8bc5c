"""The arithmetic of merged weights, in the order of PEFT's merge_and_unload on the CPU, so that the bits are equal.

Products are computed in float32 (float64 for a float64 base). The product of a linear layer is added to the weight and
rounded once; that of an embedding is rounded to the weight's dtype first. Several adapters follow each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch

from holdfast.convert.computed import ReadBox, TensorInputs, rows_per_band
from holdfast.format.dtypes import DType
from holdfast.layout.box import Box
from holdfast.plan.files import Place, RawArray
from holdfast.plan.recipe import Recipe

_ROWS = 16  # the number of rows that are computed together is a multiple


class WeightChange(Protocol):
    """A change of some rows of a weight by one adapter."""

    def inputs(self, begin: int, end: int) -> TensorInputs:
        """Yield the boxes of the adapter's tensors that the rows need."""

    def apply(self, value: torch.Tensor, base: BaseRows, begin: int, end: int) -> torch.Tensor:
        """Return the changed rows. `value` may be changed in place."""


@dataclass(frozen=True, slots=True)
class BaseRows:
    """The rows of an unmerged weight, and the function that reads tensors."""

    weight: Recipe[Place]
    read: ReadBox

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return rows of the unmerged weight. Rows beyond its end are zeros."""
        rows, columns = self.weight.shape
        stop = min(end, rows)
        if stop == end:
            return read_tensor(self.weight, Box((begin, 0), (end - begin, columns)), self.read).clone()
        out = torch.zeros(end - begin, columns, dtype=torch_dtype(self.weight.dtype))
        if stop > begin:
            out[: stop - begin] = read_tensor(self.weight, Box((begin, 0), (stop - begin, columns)), self.read)
        return out


def torch_dtype(dtype: DType) -> torch.dtype:
    found = getattr(torch, dtype.name)
    assert isinstance(found, torch.dtype)
    return found


def read_tensor(recipe: Recipe[Place], box: Box, read: ReadBox) -> torch.Tensor:
    """Return a box of a stored tensor."""
    return torch.from_numpy(read(recipe, box)).view(torch_dtype(recipe.dtype))


@dataclass(frozen=True, slots=True)
class MergedWeight:
    """A weight with the changes of all adapters. `rows` exceeds those of the base if tokens were added."""

    base: Recipe[Place]
    rows: int
    changes: tuple[WeightChange, ...]
    not_finite: dict[int, int] = field(default_factory=dict, compare=False)  # by first row of a computed band

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.base.shape[1]

    @property
    def dtype(self) -> DType:
        return self.base.dtype

    @property
    def band_rows(self) -> int:
        return rows_per_band(self.shape[1], _ROWS)

    def inputs(self, begin: int, end: int) -> TensorInputs:
        stop = min(end, self.base.shape[0])
        if stop > begin:
            yield self.base, Box((begin, 0), (stop - begin, self.shape[1]))
        for change in self.changes:
            yield from change.inputs(begin, end)

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        base = BaseRows(self.base, read)
        value = base.rows(begin, end)
        for change in self.changes:
            value = change.apply(value, base, begin, end)
        if value.numel() and not all(map(math.isfinite, map(float, value.aminmax()))):  # both are NaN if one is
            self.not_finite[begin] = value.numel() - int(value.isfinite().sum())
        raw: RawArray = value.contiguous().view(torch.uint8).numpy().view(f"u{self.dtype.bytes}")
        return raw


@dataclass(frozen=True, slots=True, eq=False)
class LowRankChange:
    """A weight plus `scaling` times the product of two matrices; with `magnitude`, its rows or columns are rescaled.

    `is_transposed`: the weight is stored as [in, out], as GPT-2's and embeddings are, so that its rows are columns of
    `first`. `rounds_first`: the product is rounded to the weight's dtype before it is added.
    """

    first: Recipe[Place]  # A: [rank, in]
    second: Recipe[Place]  # B: [out, rank]
    scaling: float
    is_transposed: bool = False
    rounds_first: bool = False
    magnitude: Recipe[Place] | None = None
    base: Recipe[Place] | None = None  # the weight, for the norms of a transposed one
    _norms: list[torch.Tensor] = field(default_factory=list)

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield self.first, self._first_box(begin, end)
        yield self.second, self._second_box(begin, end)
        if self.magnitude is not None:
            yield self.magnitude, Box.full(self.magnitude.shape)
            if self.is_transposed and self.base is not None:
                yield self.base, Box.full(self.base.shape)
                yield self.first, Box.full(self.first.shape)

    def _first_box(self, begin: int, end: int) -> Box:
        if not self.is_transposed:
            return Box.full(self.first.shape)
        return Box((0, begin), (self.first.shape[0], end - begin))

    def _second_box(self, begin: int, end: int) -> Box:
        if self.is_transposed:
            return Box.full(self.second.shape)
        return Box((begin, 0), (end - begin, self.second.shape[1]))

    def delta(self, begin: int, end: int, dtype: torch.dtype, read: ReadBox) -> torch.Tensor:
        """Return rows of the scaled product."""
        first = read_tensor(self.first, self._first_box(begin, end), read).to(dtype)
        second = read_tensor(self.second, self._second_box(begin, end), read).to(dtype)
        product = second @ first
        return (product.T if self.is_transposed else product).mul_(self.scaling)

    def apply(self, value: torch.Tensor, base: BaseRows, begin: int, end: int) -> torch.Tensor:
        dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
        delta = self.delta(begin, end, dtype, base.read)
        if self.magnitude is None:
            if self.rounds_first or value.dtype is dtype:
                value += delta.to(value.dtype)
                return value
            return value.to(dtype).add_(delta).to(value.dtype)  # an eighth of the time of adding different dtypes
        magnitude = read_tensor(self.magnitude, Box.full(self.magnitude.shape), base.read).to(dtype).reshape(-1)
        if self.is_transposed:
            return (magnitude / self._column_norms(base, dtype) * (value + delta)).to(value.dtype)
        norms = torch.linalg.norm(base.rows(begin, end) + delta, dim=1)
        rescaled: torch.Tensor = (magnitude[begin:end] / norms)[:, None] * (value + delta)
        return rescaled.to(value.dtype)

    def _column_norms(self, base: BaseRows, dtype: torch.dtype) -> torch.Tensor:
        """Return the norms of the columns of the unmerged weight plus the product: read once, band by band."""
        if not self._norms:
            rows, columns = base.weight.shape
            squares = torch.zeros(columns, dtype=torch.float64)
            step = rows_per_band(columns, _ROWS)
            for begin in range(0, rows, step):
                end = min(begin + step, rows)
                changed = base.rows(begin, end) + self.delta(begin, end, dtype, base.read)
                squares += changed.double().square().sum(dim=0)
            self._norms.append(squares.sqrt().to(dtype))
        return self._norms[0]


@dataclass(frozen=True, slots=True)
class TokenRowsChange:
    """Rows of an embedding that were trained as a whole."""

    indices: tuple[int, ...]
    values: Recipe[Place]

    def _within(self, begin: int, end: int) -> list[tuple[int, int]]:
        return [(row, index) for row, index in enumerate(self.indices) if begin <= index < end]

    def _box(self, row: int) -> Box:
        return Box((row, 0), (1, self.values.shape[1]))

    def inputs(self, begin: int, end: int) -> TensorInputs:
        for row, _ in self._within(begin, end):
            yield self.values, self._box(row)

    def apply(self, value: torch.Tensor, base: BaseRows, begin: int, end: int) -> torch.Tensor:
        for row, index in self._within(begin, end):
            value[index - begin] = read_tensor(self.values, self._box(row), base.read)[0].to(value.dtype)
        return value


@dataclass(frozen=True, slots=True)
class BiasChange:
    """A bias, as a matrix of one row, plus `scaling` times the adapter's bias."""

    bias: Recipe[Place]
    scaling: float

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield self.bias, Box.full(self.bias.shape)

    def apply(self, value: torch.Tensor, base: BaseRows, begin: int, end: int) -> torch.Tensor:
        dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
        value += read_tensor(self.bias, Box.full(self.bias.shape), base.read).to(dtype) * self.scaling
        return value
