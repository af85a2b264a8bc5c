"""A DataLoader whose epochs can be begun anywhere: order and streams of workers depend on seed and epoch alone.

A plain DataLoader draws numbers from torch's global stream whenever an epoch begins: the order of `shuffle=True`, and
a seed for its workers. A run that resumes begins an epoch once more, so its model would draw other numbers from
there on. The copy made here draws from a generator of its own, which each epoch sets anew.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from holdfast.core.errors import InvalidArgument, Unsupported

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # they draw from `generator` alone
_FIXED = (SequentialSampler, list, tuple, range)  # a DataLoader takes any iterable of indices as its sampler


class RepeatableLoader:
    """A copy of a DataLoader for `Batches`; the loader itself, its samplers and its workers are left as they are."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        _require_plain(loader)
        self._order = torch.Generator()
        # Of its own: a loader whose workers persist draws from it in its first epoch only.
        self._worker_seeds = torch.Generator()
        self._name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        outer = getattr(loader, self._name)
        self.sampler = outer.sampler if type(outer) is BatchSampler else outer
        _require_repeatable(self.sampler)
        self.draws = _draws(self.sampler)
        self._indices = _EpochIndices(self._own_indices(outer), in_workers=loader.num_workers > 0)
        self._by_epoch = {id(each): each for each in (outer, self.sampler) if hasattr(each, "set_epoch")}
        self._loader = copy.copy(loader)
        vars(self._loader).update({self._name: self._indices, "generator": self._worker_seeds, "_iterator": None})

    def _own_indices(self, outer: Any) -> Any:
        """Return the indices that the loader fetches, drawn from the generator of this object."""
        if not self.draws:
            return outer
        drawing: Any = copy.copy(self.sampler)
        drawing.generator = self._order
        if outer is self.sampler:
            return drawing
        batches = copy.copy(outer)
        batches.sampler = drawing
        return batches

    def __len__(self) -> int:
        return len(self._loader)

    def epoch(self, seed: int, epoch: int, first: int) -> Iterator[Any]:
        """Return the batches of an epoch from number `first` on; nothing is read for those before."""
        for sampler in self._by_epoch.values():
            sampler.set_epoch(epoch)
        self._order.manual_seed(_mixed(seed, epoch))
        self._indices.begin(seed, epoch, first)
        return iter(self._loader)


class _EpochIndices:
    """The indices that a loader fetches in an epoch; those that go to a worker carry the seed of its streams."""

    def __init__(self, indices: Any, *, in_workers: bool) -> None:
        self._indices = indices
        self._in_workers = in_workers
        self._seed = self._epoch = self._first = 0

    def begin(self, seed: int, epoch: int, first: int) -> None:
        self._seed, self._epoch, self._first = seed, epoch, first

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, first = self._seed, self._epoch, self._first
        for number, fetched in enumerate(self._indices):
            if number >= first:
                yield _ForWorker(fetched, _mixed(seed, epoch, number, fetched)) if self._in_workers else fetched


@dataclass(frozen=True, slots=True)
class _ForWorker:
    """Indices on their way to a worker, which gets them bare, its random streams set for them.

    So what transforms draw depends on the batch, not on the worker that reads it or on the batches it has read.
    """

    indices: Any
    seed: int

    def __reduce__(self) -> Any:
        return _arrive, (self.indices, self.seed)


def _arrive(indices: Any, seed: int) -> Any:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    return indices


def _mixed(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


def _draws(sampler: Any) -> bool:
    """Return True for samplers of torch that draw their order from a generator."""
    return _iterates_as(sampler, _DRAWING)


def _iterates_as(sampler: Any, kinds: tuple[type, ...]) -> bool:
    """Return True for objects of these classes, and of subclasses that do not change the order."""
    return any(isinstance(sampler, kind) and type(sampler).__iter__ is kind.__iter__ for kind in kinds)  # type: ignore[attr-defined]


def _require_plain(loader: Any) -> None:
    """Raise for what is not a DataLoader of torch, or reads data in an order that cannot be begun anywhere."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise InvalidArgument(f"Batches({kind}): give a torch.utils.data.DataLoader")
    if hasattr(loader, "state_dict"):
        raise InvalidArgument(
            f"Batches({kind}): keeps its position itself: put it into the state as it is, and iterate over it. Make it "
            "with generator=torch.Generator(), or it draws from the streams of the model"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise Unsupported(
            f"Batches({kind}): has an __iter__ of its own, whose order Holdfast does not know: give a plain "
            "DataLoader. For a loader that accelerate prepared, use holdfast.integrations.accelerate"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise Unsupported(
            f"Batches: {type(loader.dataset).__name__} is an IterableDataset, in which Holdfast cannot skip: use "
            "torchdata's StatefulDataLoader, or an object with state_dict and load_state_dict that keeps the position"
        )


def _require_repeatable(sampler: Any) -> None:
    """Raise unless the order of an epoch is known to depend on the epoch alone."""
    if _iterates_as(sampler, _FIXED) or _draws(sampler) or hasattr(sampler, "set_epoch"):
        return
    raise Unsupported(
        f"Batches: the order of {type(sampler).__name__} is not known to depend on the epoch alone, so that a resumed "
        "run could not find its place: give it a method set_epoch(epoch) that determines the order"
    )
