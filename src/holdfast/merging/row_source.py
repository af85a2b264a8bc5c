"""A tensor whose rows are gathered by token: rows of one model's tensor, and of others where it lacks the token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.convert.source_files import SourceFiles
from holdfast.format.dtypes import DType
from holdfast.merging.model_input import TensorSource
from holdfast.plan.files import Place, RawArray

NOWHERE = -1  # a row of zeros

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class RowOrigins:
    """For each row of the output the model and the row that it is read from; rows that are means of several."""

    models: Numbers
    rows: Numbers
    means: Mapping[int, tuple[tuple[int, int], ...]]

    def runs(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Return ranges of rows that are consecutive rows of one model."""
        models, rows = self.models[begin:end], self.rows[begin:end]
        breaks = np.flatnonzero((np.diff(models) != 0) | (np.diff(rows) != 1)) + 1
        edges = [0, *breaks.tolist(), end - begin]
        return [(begin + a, begin + b) for a, b in itertools.pairwise(edges)]


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """A tensor of gathered rows. `sources` has the tensor of every model, None where a model has none."""

    shape: tuple[int, ...]
    dtype: DType
    sources: tuple[TensorSource | None, ...]
    origins: RowOrigins

    def places(self, model: int) -> Sequence[Place]:
        return [place for source in self.sources if source is not None for place in source.places(model)]

    def read(self, files: Sequence[SourceFiles], start: int, stop: int, buffer: RawArray | None = None) -> torch.Tensor:
        width = math.prod(self.shape[1:])
        first, last = start // width, -(-stop // width)
        out = torch.zeros((last - first, width), dtype=getattr(torch, self.dtype.name))
        for begin, end in self.origins.runs(first, last):
            model, row = int(self.origins.models[begin]), int(self.origins.rows[begin])
            if model != NOWHERE:
                out[begin - first : end - first] = self._rows(files, model, row, row + end - begin)
        for number, parts in self.origins.means.items():
            if first <= number < last:
                rows = [self._rows(files, model, row, row + 1).double() for model, row in parts]
                out[number - first] = (torch.cat(rows).sum(dim=0) / len(rows)).to(out.dtype)
        return out.flatten()[start - first * width : stop - first * width]

    def _rows(self, files: Sequence[SourceFiles], model: int, begin: int, end: int) -> torch.Tensor:
        source = self.sources[model]
        assert source is not None
        width = math.prod(self.shape[1:])
        return source.read(files, begin * width, end * width).reshape(end - begin, width)
