"""The numbers of all texts of a set: 8 bytes each in place of the texts, to find equal ones without reading them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

Numbers = NDArray[np.uint64]


def text_number(text: str) -> int:
    """Return the number of a text; two different texts share one with a probability of 1 in 2^64."""
    return xxhash.xxh3_64_intdigest(text.encode())


class RowIndex:
    """The numbers of the texts of each row, in memory: 8 bytes a text and 8 a row."""

    def __init__(self) -> None:
        self._begins = array("q", [0])
        self._numbers = array("Q")

    def __len__(self) -> int:
        return len(self._begins) - 1

    def add(self, texts: Sequence[str]) -> None:
        self._numbers.extend(map(text_number, texts))
        self._begins.append(len(self._numbers))

    def counts(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many texts these rows have."""
        begins = np.frombuffer(self._begins, np.int64)
        return begins[rows + 1] - begins[rows]

    def numbers(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Numbers:
        """Return the numbers of some texts of each row: `columns` [rows, texts] says which."""
        begins = np.frombuffer(self._begins, np.int64)
        found: Numbers = np.frombuffer(self._numbers, np.uint64)[begins[rows, None] + columns]
        return found

    def digest(self) -> str:
        """Return a digest of all texts in their order."""
        digest = xxhash.xxh3_128(memoryview(self._begins).cast("B"))
        digest.update(memoryview(self._numbers).cast("B"))
        return digest.hexdigest()
