"""Batches of texts from several sets, the same whatever the number of ranks, and a run's position in them.

`consumed_samples` counts rows over all ranks since the run began, and is the position. Which rows a batch has follows
from it, the seed and the texts alone; each rank reads only its share of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.train.embedding.data.mixture import Mixture
from holdfast.train.embedding.data.row_order import RowOrder, seed_of
from holdfast.train.embedding.data.row_stream import Draw, RowStream
from holdfast.train.embedding.data.text_set import IndexedSet, TextSet


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A rank's rows of a batch: what `GradCache.step` and the losses are given."""

    name: str  # of the set that all rows come from
    columns: list[list[str]]  # queries, positives, and each column of negatives
    rows: NDArray[np.int64]  # the numbers of the rows in their set
    texts: torch.Tensor  # [rows, columns], int64: numbers that equal texts share
    labels: torch.Tensor | None = None  # [rows], float64
    scores: torch.Tensor | None = None  # [rows, documents] or [rows, negatives], float64


class EmbeddingData:
    """Batches of texts for an embedding model, with the position of a run in them.

    Every row of every file is read once here, and checked: a row that cannot be trained on raises InvalidArgument
    with its file and line. What stays in memory is 16 bytes a row and 8 a text.

    Args:
        sets: Where the rows come from. A batch has rows of one set.
        global_batch: Rows of a batch, over all ranks.
        seed: Shuffles each set, differently in each epoch, and places the sets.

    Save it with the run, as an object of the state. A checkpoint of other data, another batch or another seed raises
    Mismatch; the number of ranks may change between any two batches.
    """

    def __init__(self, sets: Sequence[TextSet], *, global_batch: int, seed: int = 1) -> None:
        if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
            raise InvalidArgument(f"global_batch={global_batch!r} must be an integer of at least 1")
        titles = [each.title for each in sets]
        if not titles or len(set(titles)) < len(titles):
            raise InvalidArgument(f"the sets are named {titles}: give at least one, each with a name of its own")
        if len({each.weight is None for each in sets}) > 1:
            raise InvalidArgument("some sets have a weight, and some have none: give each one, or none")
        self.consumed_samples = 0
        self.global_batch = global_batch
        self._sets = [IndexedSet(each) for each in sets]
        for each in self._sets:
            _check_batch(each, global_batch)
        weights = [
            float(len(opened)) if each.weight is None else each.weight
            for each, opened in zip(sets, self._sets, strict=True)
        ]
        self._mixture = Mixture(weights, seed)
        self._orders = [RowOrder(len(each), seed_of(seed, "rows", each.name), each.groups) for each in self._sets]
        self._streams = [
            RowStream(each, order, global_batch) for each, order in zip(self._sets, self._orders, strict=True)
        ]
        self._draw: Draw | None = None
        self._order = {
            "seed": seed,
            "global_batch": global_batch,
            "sets": "; ".join(f"{each.identity}*{weight}" for each, weight in zip(self._sets, weights, strict=True)),
        }
        for stream in self._streams:
            stream.draw()  # a set that cannot fill a batch is refused before the run begins

    @property
    def waiting(self) -> int:
        """The number of rows that wait for a batch without their texts."""
        return sum(stream.waiting for stream in self._streams)

    def require(self, *, labels: bool = False, scores: bool = False) -> None:
        """Raise InvalidArgument if the rows of a set lack what a loss needs."""
        for each in self._sets:
            for name, needed, has in (("label", labels, each.has_labels), ("scores", scores, each.has_scores)):
                if needed and not has:
                    raise InvalidArgument(f"{each.files}: the rows have no {name!r}, which the loss needs")

    def epochs(self) -> dict[str, float]:
        """Return how often each set was gone through."""
        each = zip(self._sets, self._streams, self._orders, strict=True)
        return {opened.name: stream.position / order.length for opened, stream, order in each}

    def batch(self, rank: int = 0, ranks: int = 1) -> TextBatch:
        """Return a rank's rows of the next batch: those of all ranks, in their order, are the batch."""
        if not 0 <= rank < ranks:
            raise InvalidArgument(f"rank={rank} must be at least 0 and below ranks={ranks}")
        if ranks > self.global_batch:
            raise InvalidArgument(f"global_batch={self.global_batch} leaves some of {ranks} ranks without a row")
        number, draw = self._next()
        rows = self._sets[number]
        begin, end = (each * self.global_batch // ranks for each in (rank, rank + 1))
        chosen, epochs = draw.rows[begin:end], draw.epochs[begin:end]
        found = rows.read(chosen, epochs)
        return TextBatch(
            rows.name,
            [list(column) for column in zip(*(row.texts for row in found), strict=True)],
            chosen,
            torch.from_numpy(rows.numbers(chosen, epochs).view(np.int64)),
            torch.tensor([row.label for row in found], dtype=torch.float64) if rows.has_labels else None,
            torch.tensor([row.scores for row in found], dtype=torch.float64) if rows.has_scores else None,
        )

    def advance(self) -> None:
        """Move on past the batch just trained on."""
        number, draw = self._next()
        self._streams[number].commit(draw)
        self._draw = None
        self.consumed_samples += self.global_batch

    def seek(self, consumed_samples: int) -> None:
        """Go to a position: batches are counted again from the first one, without reading texts."""
        self.consumed_samples = self._checked_position(consumed_samples)
        batches = consumed_samples // self.global_batch
        counts = np.bincount(self._mixture.sets(0, batches), minlength=len(self._streams))
        for stream, count in zip(self._streams, counts.tolist(), strict=True):
            stream.skip(count)
        self._draw = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and where each set stands in its rows unless too many of them wait."""
        states = [stream.state() for stream in self._streams]
        streams = "" if None in states else ";".join(state or "" for state in states)
        return {"consumed_samples": self.consumed_samples, "streams": streams, **self._order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._order.items():
            if state.get(name) != mine:
                raise Mismatch(
                    f"the checkpoint's data has {name}={state.get(name)!r}, but this run's has {mine!r}: rows would be "
                    "repeated or skipped; use the same data, or leave the position out of the load"
                )
        consumed = state.get("consumed_samples")
        streams = state.get("streams")
        if not streams:
            self.seek(self._checked_position(consumed))
            return
        self.consumed_samples = self._checked_position(consumed)
        for stream, stored in zip(self._streams, streams.split(";"), strict=True):
            stream.load(stored)
        self._draw = None

    def close(self) -> None:
        """Close the files; a later batch opens them again."""
        for each in self._sets:
            each.close()

    def _next(self) -> tuple[int, Draw]:
        number = int(self._mixture.sets(self.consumed_samples // self.global_batch, 1)[0])
        if self._draw is None:
            self._draw = self._streams[number].draw()
        return number, self._draw

    def _checked_position(self, consumed: object) -> int:
        if isinstance(consumed, bool) or not isinstance(consumed, int) or consumed < 0 or consumed % self.global_batch:
            raise Mismatch(
                f"consumed_samples={consumed!r} must be a multiple of global_batch={self.global_batch}, at least 0"
            )
        return consumed


def _check_batch(rows: IndexedSet, global_batch: int) -> None:
    if global_batch == 1 and not rows.negatives:
        raise InvalidArgument(
            f"{rows.first_place}: the rows have no negatives, and global_batch=1 compares a query with no other row's "
            "positive: use a larger batch"
        )
    if global_batch > len(rows):
        raise InvalidArgument(
            f"{rows.files}: {len(rows)} rows do not fill a batch of {global_batch}: use a smaller batch"
        )
