"""New rows of stored tensors, computed while they are written: the mean of the rows of known tokens, or zeros."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from holdfast.convert.computed import ReadBox, TensorInputs, rows_per_band
from holdfast.format.dtypes import DType, dtype_named, numpy_dtype
from holdfast.layout.box import Box
from holdfast.plan.files import Place, RawArray
from holdfast.plan.recipe import Recipe, cast_raw


@dataclass(frozen=True, slots=True)
class MeanRows:
    """`rows` equal rows: the mean of the first `used` rows of a matrix, summed in float64 band by band."""

    matrix: Recipe[Place]
    used: int
    rows: int
    _mean: list[RawArray] = field(default_factory=list)  # once it is known

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.matrix.shape[1]

    @property
    def dtype(self) -> DType:
        return self.matrix.dtype

    @property
    def band_rows(self) -> int:
        return rows_per_band(self.shape[1])

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield self.matrix, Box((0, 0), (self.used, self.shape[1]))

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        if not self._mean:
            total = np.zeros(self.shape[1], np.float64)
            for box in self._bands():
                total += read(self.matrix, box).view(numpy_dtype(self.dtype.name)).astype(np.float64).sum(0)
            mean = (total / max(self.used, 1)).view("u8")
            self._mean.append(cast_raw(mean, dtype_named("float64"), (self.dtype,)))
        return np.broadcast_to(self._mean[0], (end - begin, self.shape[1]))

    def _bands(self) -> Iterator[Box]:
        for at in range(0, self.used, self.band_rows):
            yield Box((at, 0), (min(self.band_rows, self.used - at), self.shape[1]))


@dataclass(frozen=True, slots=True)
class ZeroRows:
    """Rows of zeros."""

    shape: tuple[int, int]
    dtype: DType

    @property
    def band_rows(self) -> int:
        return rows_per_band(self.shape[1])

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield from ()

    def compute(self, begin: int, end: int, read: ReadBox) -> Any:
        return np.zeros((end - begin, self.shape[1]), f"u{self.dtype.bytes}")
