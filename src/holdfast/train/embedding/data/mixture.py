"""Which set a batch comes from: a fixed sequence by weight, computed for any batch and never stored."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.data.row_order import seed_of

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_WHOLE = 1 << 64


class Mixture:
    """Sets in proportion to their weights, interleaved as evenly as multiples of the golden ratio are."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        for weight in weights:
            if isinstance(weight, bool) or not (math.isfinite(weight) and weight > 0):
                raise InvalidArgument(f"weight={weight!r} must be a number above 0")
        total = math.fsum(weights)
        ends = [min(int(end / total * _WHOLE), _WHOLE - 1) for end in itertools.accumulate(weights)]
        self._ends = np.array(ends[:-1], dtype=np.uint64)
        self._start = np.uint64(seed_of(seed, "sets"))

    def sets(self, first: int, count: int) -> NDArray[np.int64]:
        """Return the sets of the batches [first, first + count)."""
        batches = np.arange(first, first + count).astype(np.uint64)
        return np.searchsorted(self._ends, self._start + batches * _GOLDEN, side="right").astype(np.int64)
