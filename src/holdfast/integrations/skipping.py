"""A DataLoader that begins amid an epoch: its sampler leaves out the batches that were used."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader


def without_first(
    loader: DataLoader[Any], count: int, before_first: Callable[[], None] = lambda: None
) -> DataLoader[Any]:
    """Return a loader of the same settings that leaves out `count` batches, without reading them.

    `before_first` is called once the sampler has left them out, before the first batch is read.
    """
    skipping = copy.copy(loader)
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    vars(skipping)[name] = _WithoutFirst(getattr(loader, name), count, before_first)
    vars(skipping)["_iterator"] = None  # its workers are its own
    return skipping


class _WithoutFirst:
    def __init__(self, indices: Any, count: int, before_first: Callable[[], None]) -> None:
        self._indices = indices
        self._count = count
        self._before_first = before_first

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        for number, index in enumerate(self._indices):
            if number == self._count:
                self._before_first()
            if number >= self._count:
                yield index
