"""The rows of one set in batches without equal texts: a row with a text that the batch has waits for a later one.

Rows that wait are considered first, in their order. A row that a batch cannot take waits at the end again. A row that
is still waiting when the next epoch comes to it is not put in line a second time, so no more rows wait than the set
has. All of this depends on the numbers of the texts only: no rank reads a text to know the batches.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.data.row_order import RowOrder
from holdfast.train.embedding.data.text_set import IndexedSet

_MOST_CONSIDERED = 8  # waiting rows that a batch considers at first, as a multiple of its size
_LEAST_DRAWN = 256  # rows whose texts are looked up at once
_MOST_STORED = 10_000  # waiting rows that a checkpoint holds: more of them are found again by counting from the start

Integers = NDArray[np.int64]
Entry = tuple[int, int]  # a position in the order of the set, and the row there


@dataclass(frozen=True, slots=True)
class Draw:
    """The next batch of a stream, which is left as it is until the draw is committed."""

    rows: Integers
    epochs: Integers  # in which each row was drawn
    end: int  # the position after the draw
    considered: int = 0  # waiting rows that leave the head of the line
    put_off: tuple[Entry, ...] = ()  # what joins the end of the line
    rows_taken: frozenset[int] = frozenset()  # rows that waited and are in the batch
    rows_joined: frozenset[int] = frozenset()  # rows that begin to wait


class RowStream:
    """Batches of one set. `draw` returns the next one, `commit` moves on."""

    def __init__(self, rows: IndexedSet, order: RowOrder, batch: int) -> None:
        self._rows, self._order, self._batch = rows, order, batch
        self.position = 0
        self._line: deque[Entry] = deque()
        self._waiting_rows: set[int] = set()

    @property
    def waiting(self) -> int:
        """The number of rows that wait for a later batch."""
        return len(self._line)

    def draw(self) -> Draw:
        """Return the next batch. Raises InvalidArgument if no rows of the set fill one."""
        if self._rows.keeps_duplicates:
            positions = np.arange(self.position, self.position + self._batch, dtype=np.int64)
            return Draw(self._order.at(positions), positions // self._order.length, self.position + self._batch)
        partial = _PartialBatch(self._rows, self._order, self._batch, self._waiting_rows)
        first = itertools.islice(self._line, _MOST_CONSIDERED * self._batch)
        considered = partial.consider_waiting(list(first))
        position = self.position
        last = position + 2 * self._order.length  # by then every row was considered, wherever the epoch ends
        while partial.missing and position < last:
            end = min(position + max(partial.missing, _LEAST_DRAWN), last)
            position += partial.consider_new(np.arange(position, end, dtype=np.int64))
        if partial.missing:
            considered += partial.consider_waiting(list(itertools.islice(self._line, considered, None)))
        if partial.missing:
            raise InvalidArgument(
                f"{self._rows.files}: after {len(partial.taken)} rows every other of the {len(self._rows)} has a text "
                f"in common with one of them, and a batch needs {self._batch}: use a smaller batch, or "
                "duplicates='keep'"
            )
        return partial.result(considered, position)

    def commit(self, draw: Draw) -> None:
        """Move on to the batch after a draw."""
        for _ in range(draw.considered):
            self._line.popleft()
        self._line.extend(draw.put_off)
        self._waiting_rows -= draw.rows_taken
        self._waiting_rows |= draw.rows_joined
        self.position = draw.end

    def skip(self, batches: int) -> None:
        """Go to the batch after so many from the first one."""
        self.position, self._line, self._waiting_rows = 0, deque(), set()
        if self._rows.keeps_duplicates:
            self.position = batches * self._batch
            return
        for _ in range(batches):
            self.commit(self.draw())

    def state(self) -> str | None:
        """Return the position and the rows that wait, as text; None if too many wait."""
        return None if len(self._line) > _MOST_STORED else _joined(self.position, self._line)

    def load(self, state: str) -> None:
        """Go to a stored state."""
        self.position, *line = map(int, state.split(","))
        rows = self._order.at(np.array(line, dtype=np.int64)).tolist()
        self._line = deque(zip(line, rows, strict=True))
        self._waiting_rows = set(rows)


class _PartialBatch:
    """A batch while it is filled: rows are taken in their order if no text of theirs is in it yet."""

    def __init__(self, rows: IndexedSet, order: RowOrder, batch: int, waiting_rows: set[int]) -> None:
        self._rows, self._order, self._batch = rows, order, batch
        self._waiting_rows = waiting_rows
        self._texts: set[int] = set()
        self._rows_taken: set[int] = set()
        self._rows_joined: set[int] = set()
        self._put_off: list[Entry] = []
        self.taken: list[Entry] = []

    @property
    def missing(self) -> int:
        return self._batch - len(self.taken)

    def consider_waiting(self, entries: list[Entry]) -> int:
        """Take rows that wait, until the batch is full; return how many were considered."""
        for count, (entry, texts) in enumerate(zip(entries, self._texts_of(entries), strict=True)):
            if not self.missing:
                return count
            if self._take(entry, texts):
                self._rows_taken.add(entry[1])
            else:
                self._put_off.append(entry)
        return len(entries)

    def consider_new(self, positions: Integers) -> int:
        """Take the next rows, until the batch is full; return how many were considered.

        Rows that do not fit join the line, unless they wait in it already.
        """
        entries = list(zip(positions.tolist(), self._order.at(positions).tolist(), strict=True))
        for count, (entry, texts) in enumerate(zip(entries, self._texts_of(entries), strict=True)):
            if not self.missing:
                return count
            row = entry[1]
            waits = (row in self._waiting_rows and row not in self._rows_taken) or row in self._rows_joined
            if not waits and not self._take(entry, texts):
                self._put_off.append(entry)
                self._rows_joined.add(row)
        return len(entries)

    def result(self, considered: int, end: int) -> Draw:
        rows, epochs = self._rows_and_epochs(self.taken)
        joined, taken = frozenset(self._rows_joined), frozenset(self._rows_taken)
        return Draw(rows, epochs, end, considered, tuple(self._put_off), taken, joined)

    def _take(self, entry: Entry, texts: list[int]) -> bool:
        fits = self._texts.isdisjoint(texts)
        if fits:
            self._texts.update(texts)
            self.taken.append(entry)
        return fits

    def _texts_of(self, entries: list[Entry]) -> list[list[int]]:
        found: list[list[int]] = self._rows.numbers(*self._rows_and_epochs(entries)).tolist()
        return found

    def _rows_and_epochs(self, entries: list[Entry]) -> tuple[Integers, Integers]:
        both = np.array(entries, dtype=np.int64).reshape(-1, 2)
        return both[:, 1], both[:, 0] // self._order.length


def _joined(position: int, line: Iterable[Entry]) -> str:
    return ",".join(map(str, (position, *(waiting for waiting, _ in line))))
