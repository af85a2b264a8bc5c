"""The validation loaders of a Trainer: what they draw is drawn once in a run, not once more after each resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.integrations.lightning.train_loaders import generators_of
from holdfast.integrations.worker_seeds import has_workers, seeded_apart


class ValLoaders:
    """Keeps which validation loaders have started persistent workers, and the states of the loaders' generators.

    Such workers take a seed from the global stream at the first validation, or from an isolated one at the sanity
    check. A resumed run starts them again, where the run that never stopped draws nothing.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._started: frozenset[int] = frozenset()  # by the starts before this one
        self._taken_over: list[Any] = []
        self._generators: list[torch.Tensor] | None = None  # to be restored

    def fields(self) -> dict[str, Any]:
        """Return the state, for a checkpoint."""
        running = {number for number, loader in enumerate(self._loaders()) if has_workers(loader)}
        states = self._generators or [generator.get_state() for generator in self._own_generators()]
        return {"started": sorted(self._started | running), "generators": states}

    def resume_at(self, fields: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, for the loaders that this run makes first."""
        self._started = frozenset(fields["started"])
        self._generators = list(fields["generators"])

    def prepare(self) -> None:
        """Take over the loaders that the Trainer has made. Called before each validation."""
        is_first = not self._taken_over
        for number, loader in enumerate(self._loaders()):
            if isinstance(loader, DataLoader) and not any(loader is other for other in self._taken_over):
                self._taken_over.append(loader)
                _take_over(loader, apart=is_first and number in self._started)
        if not self._trainer.sanity_checking:
            self.restore_generators()

    def restore_generators(self) -> None:
        """Restore the generators of the loaders, once there are loaders and after a sanity check, which draws."""
        generators = self._own_generators()
        if self._generators is None or not self._loaders():
            return
        if len(generators) == len(self._generators):
            for generator, state in zip(generators, self._generators, strict=True):
                generator.set_state(state)
        self._generators = None

    def _own_generators(self) -> list[torch.Generator]:
        """Return the generators that no training loader has: those are restored to where the epoch began."""
        shared = set(map(id, generators_of(_loaders_of(self._trainer.fit_loop))))
        return [generator for generator in generators_of(self._loaders()) if id(generator) not in shared]

    def _loaders(self) -> list[Any]:
        return _loaders_of(self._trainer.fit_loop.epoch_loop.val_loop)


def _loaders_of(loop: Any) -> list[Any]:
    combined = loop._combined_loader
    return [] if combined is None else list(combined.flattened)


def _take_over(loader: Any, *, apart: bool) -> None:
    """Exchange the class of a loader: `iter()` looks for methods there."""
    kind = type(loader)
    if not hasattr(kind, "_holdfast_val_kind"):
        fields = {"__iter__": _iterate, "_holdfast_val_kind": kind, "__module__": kind.__module__}
        loader.__class__ = type(kind.__name__, (kind,), fields)
    loader._holdfast_apart = apart


def _iterate(loader: Any) -> Iterator[Any]:
    apart, loader._holdfast_apart = loader._holdfast_apart, False
    with seeded_apart(loader, when=apart):
        return loader._holdfast_val_kind.__iter__(loader)  # type: ignore[no-any-return]
