"""The training loaders of a Trainer: the order and position of their epoch, kept and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.core.warnings import warn
from holdfast.integrations.skipping import without_first
from holdfast.integrations.worker_seeds import seeded_apart
from holdfast.random_streams import RandomStreams

_KNOWN_SAMPLERS = ("torch.", "lightning.", "pytorch_lightning.", "lightning_fabric.")  # draw when an epoch begins


class TrainLoaders:
    """Takes over how the training loaders of a Trainer begin an epoch.

    Their iterators are made at the first fetch of an epoch, where the random streams are kept. Amid an epoch a resumed
    run sets these again, so that a sampler draws the same order, leaves out the batches that were used, and then sets
    the streams of the save.
    """

    def __init__(self, trainer: Any, streams: RandomStreams, *, replay: bool = False) -> None:
        self._trainer = trainer
        self._replay = replay
        self._streams = streams
        self._begin: Mapping[str, Any] = {}  # of the epoch that runs
        self._is_first = True  # the seed of persistent workers is drawn in the first epoch of a run
        self._skip = 0
        self._own_state = False  # the loader finds its position with a state of its own
        self._resumed: Mapping[str, Any] | None = None

    # Save.

    def fields(self, used: int, *, is_amid: bool) -> dict[str, Any]:
        """Return the position after `used` batches of the epoch; raises Unsupported where it could not be resumed."""
        if is_amid:
            self._require_repeatable()
        now = [generator.get_state() for generator in self._generators()]
        return {
            "used": used,
            "batch_samples": self._batch_samples(),
            "samples": self._samples(),
            "is_first": self._begin["is_first"],
            "streams": self._begin["streams"],
            "generators": self._begin["generators"] if is_amid else now,
        }

    def _require_repeatable(self) -> None:
        loaders = self._loaders()
        fix = "or save at the end of epochs only (every_n_epochs=1)"
        if self._trainer.fit_loop._data_fetcher.length is None:
            raise Unsupported(f"the training data has no length, so that no batch of it can be found again: {fix}")
        if all(_is_stateful(loader) for loader in loaders):
            for loader in loaders:
                _require_own_order(loader, fix)
            return
        if len(loaders) != 1:
            raise Unsupported(
                f"{len(loaders)} training loaders without a state: use torchdata's StatefulDataLoader, {fix}"
            )
        loader = loaders[0]
        if not isinstance(loader, DataLoader):
            raise Unsupported(
                f"the training data is a {type(loader).__name__} without state_dict: use a DataLoader, {fix}"
            )
        if isinstance(loader.dataset, IterableDataset):
            raise Unsupported(f"the training data is iterable: use torchdata's StatefulDataLoader, {fix}")
        for sampler in _samplers(loader):
            if not (hasattr(sampler, "set_epoch") or type(sampler).__module__.startswith(_KNOWN_SAMPLERS)):
                raise Unsupported(
                    f"the order of the sampler {type(sampler).__name__} may depend on more than the epoch: give it a "
                    f"method set_epoch(epoch) that determines the order, {fix}"
                )

    # Resume.

    def resume_at(self, fields: Mapping[str, Any], *, is_amid: bool) -> None:
        """Take the position of a checkpoint for the first epoch of this run."""
        self._resumed = dict(fields) | {"is_amid": is_amid}

    @property
    def is_resuming(self) -> bool:
        """True while the next epoch begins amid its data."""
        return self._skip > 0 or self._own_state

    def prepare(self) -> bool:
        """Take over the loaders that the Trainer has made, and restore their position. Called before they iterate.

        Returns True if Lightning is to load states: those of loaders that find their position by themselves.
        """
        for loader in self._loaders():
            if isinstance(loader, DataLoader):
                self._take_over(loader)
        if self._resumed is None:
            return False
        resumed, self._resumed = self._resumed, None
        self._is_first = False
        generators = self._generators()
        if len(generators) == len(resumed["generators"]):
            for generator, state in zip(generators, resumed["generators"], strict=True):
                generator.set_state(state)
        if resumed["is_amid"]:
            self._check_same_samples(resumed)
            self._own_state = all(_is_stateful(loader) for loader in self._loaders())
            if not self._own_state:
                self._skip = int(resumed["used"])
                self._begin = resumed
                self._is_first = resumed["is_first"]
        return self._own_state

    def _check_same_samples(self, resumed: Mapping[str, Any]) -> None:
        now = {"batch_samples": self._batch_samples(), "samples": self._samples()}
        if any(resumed[name] != now[name] for name in now):
            raise Mismatch(
                f"saved amid an epoch of {resumed['samples']} samples, after {resumed['used']} batches of "
                f"{resumed['batch_samples']} on all ranks; now it has {now['samples']} samples and batches of "
                f"{now['batch_samples']}, so that others would be left out: give the same data and batches, or a step "
                "saved at the end of an epoch"
            )

    def _take_over(self, loader: Any) -> None:
        """Exchange the class of a loader: `iter()` looks for methods there."""
        kind = type(loader)
        if not hasattr(kind, "_holdfast_kind"):
            fields: dict[str, Any] = {"__iter__": _iterate, "_holdfast_kind": kind, "__module__": kind.__module__}
            if not hasattr(kind, "state_dict"):
                fields |= {"state_dict": _empty_state, "load_state_dict": _load_empty_state}
            loader.__class__ = type(kind.__name__, (kind,), fields)
        loader._holdfast = self

    def iterate(self, loader: Any, kind: type) -> Iterator[Any]:
        """Yield the batches of one epoch; nothing is drawn or read before the first is asked for."""
        skip, self._skip = self._skip, 0
        is_first, self._is_first = self._is_first, False
        if not skip:
            self._begin = {
                "is_first": is_first,
                "streams": RandomStreams().state_dict(),
                "generators": [generator.get_state() for generator in self._generators()],
            }
            with seeded_apart(loader, when=not is_first):
                batches = kind.__iter__(loader)  # type: ignore[attr-defined]
            if self._own_state:
                self._own_state = False
                self._streams.apply()
            yield from batches
            return
        begin = RandomStreams(late=True)
        begin.load_state_dict(self._begin["streams"])
        begin.apply()
        if not self._replay:
            if loader.num_workers:
                warn(
                    f"goes on amid an epoch after {skip} batches: random numbers that data workers draw are not those "
                    "of the run that never stopped; if the data is augmented at random, pass replay=True"
                )
            loader = without_first(loader, skip, self._streams.apply)
        with seeded_apart(loader, when=not is_first):
            batches = kind.__iter__(loader)  # type: ignore[attr-defined]
        if not self._replay:
            yield from batches
            return
        for _ in range(skip):
            next(batches)
        self._streams.apply()
        yield from batches

    # What there is.

    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return [] if combined is None else list(combined.flattened)

    def _generators(self) -> list[torch.Generator]:
        return generators_of(self._loaders())

    def _batch_samples(self) -> int:
        replicas = (self._trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        return int(sum(getattr(loader, "batch_size", 0) or 0 for loader in self._loaders()) * replicas)

    def _samples(self) -> int:
        return sum(_length(getattr(loader, "dataset", None)) for loader in self._loaders())


def generators_of(loaders: list[Any]) -> list[torch.Generator]:
    """Return the generators of loaders and of their samplers, each once."""
    found: dict[int, torch.Generator] = {}
    for loader in loaders:
        for holder in (loader, *_samplers(loader)):
            generator = getattr(holder, "generator", None)
            if isinstance(generator, torch.Generator):
                found.setdefault(id(generator), generator)
    return list(found.values())


def _iterate(loader: Any) -> Iterator[Any]:
    return loader._holdfast.iterate(loader, loader._holdfast_kind)  # type: ignore[no-any-return]


def _empty_state(loader: Any) -> dict[str, Any]:
    """Return no state: it is in the checkpoint already, and Lightning warns of loaders without one."""
    return {}


def _load_empty_state(loader: Any, state: Mapping[str, Any]) -> None:
    """Accept the empty state."""


def _is_stateful(loader: Any) -> bool:
    """Return True for a loader with a state of its own, as torchdata's StatefulDataLoader has."""
    return hasattr(getattr(loader, "_holdfast_kind", type(loader)), "load_state_dict")


def _require_own_order(loader: Any, fix: str) -> None:
    for sampler in _samplers(loader):
        if type(sampler).__name__ == "DistributedSamplerWrapper":
            raise Unsupported(
                "a StatefulDataLoader whose sampler Lightning has wrapped resumes in another order: pass "
                f"Trainer(use_distributed_sampler=False) and torchdata's StatefulDistributedSampler, {fix}"
            )


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers inside one another, without torch's own BatchSampler."""
    found: list[Any] = []
    queue = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while queue:
        sampler = queue.pop(0)
        if sampler is None or any(sampler is other for other in found):
            continue
        found.append(sampler)
        queue += [getattr(sampler, "sampler", None), getattr(getattr(sampler, "dataset", None), "_sampler", None)]
    return found


def _length(data: Any) -> int:
    try:
        return len(data)
    except TypeError:
        return 0
