"""The begin of an epoch as an entry of the state: the random streams that its order of samples was drawn from.

Trainer skips the batches that were used, and draws the order of the epoch anew for that. The order of a
SeedableRandomSampler depends on the epoch alone. Others (group_by_length, use_seedable_sampler=False, samplers with a
generator) draw from a stream, which must be where it was when the epoch began.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.integrations.worker_seeds import has_workers, seed_apart
from holdfast.random_streams import RandomStreams


class EpochBegin:
    """The streams and generators when the epoch began, the generators now, and evaluation loaders with workers."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loader: Any = None
        self._begin: Mapping[str, Any] = {}
        self._is_first = True  # the seed of the workers is drawn in the first epoch of a run
        self._loaded: Mapping[str, Any] | None = None
        # The evaluation loaders of an earlier start by name, which seeded their workers, and their generators.
        self._evaluated: dict[str, dict[str, torch.Tensor]] = {}

    def begin(self, loader: Any, *, amid: bool) -> None:
        """Note the streams of an epoch that begins. In one that is resumed `amid`, set them as they were."""
        self._loader = loader
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            self._is_first = not self._begin
            self.note()
        else:
            self._resume(loaded, loaded["begin"] if amid else {"generators": loaded["generators"], "is_first": False})
        if not self._is_first:
            seed_apart(loader)

    def _resume(self, loaded: Mapping[str, Any], begin: Mapping[str, Any]) -> None:
        self._evaluated = dict(loaded["evaluated"])
        self._is_first = begin["is_first"]
        _set_generators(self._loader, begin["generators"])
        if "streams" in begin:
            RandomStreams().load_state_dict(begin["streams"])
            self._begin = begin

    def note(self) -> None:
        """Note the streams as they are: the order of the epoch is drawn from them next."""
        self._begin = {
            "streams": RandomStreams().state_dict(),
            "generators": _states(self._loader),
            "is_first": self._is_first,
        }

    def begin_evaluation(self, loader: Any) -> None:
        """Let an evaluation loader with persistent workers go on where an earlier start of the run left it."""
        for name, kept in self._kept_loaders().items():
            if kept is loader and name in self._evaluated:
                _set_generators(loader, self._evaluated.pop(name))
                seed_apart(loader)

    def _kept_loaders(self) -> Mapping[str, Any]:
        return getattr(self._trainer, "_eval_dataloaders", {})

    def state_dict(self) -> dict[str, Any]:
        """Return the begin of the epoch that runs, or what was loaded and waits for the first epoch."""
        if self._loaded is not None:
            return dict(self._loaded)
        running = {name: _states(kept) for name, kept in self._kept_loaders().items() if has_workers(kept)}
        return {
            "begin": dict(self._begin),
            "generators": _states(self._loader),
            "evaluated": self._evaluated | running,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loaded = dict(state)

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Return the state of the first rank: all ranks must draw the same order."""
        return states[min(states)]


def _states(loader: Any) -> dict[str, torch.Tensor]:
    return {name: generator.get_state() for name, generator in _generators(loader)}


def _set_generators(loader: Any, states: Mapping[str, torch.Tensor]) -> None:
    for name, generator in _generators(loader):
        if name in states:
            generator.set_state(states[name])


def _generators(loader: Any) -> Iterator[tuple[str, torch.Generator]]:
    """Yield the generators of a loader, its samplers inside one another and its dataset, by where they are."""
    seen: set[int] = set()
    places = [("loader", loader), ("dataset", getattr(loader, "dataset", None))]
    for name, place in places:
        if place is None or id(place) in seen:
            continue
        seen.add(id(place))
        for attribute in ("generator", "synchronized_generator"):
            generator = getattr(place, attribute, None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield f"{name}.{attribute}", generator
        if name != "dataset":
            inner = ("batch_sampler", "sampler")
            places += [(f"{name}.{attribute}", getattr(place, attribute, None)) for attribute in inner]
