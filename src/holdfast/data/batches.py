"""`Batches`, the batches of a plain DataLoader as a state: epoch and position, resumed amid an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.core.warnings import warn
from holdfast.data.repeatable_loader import RepeatableLoader


@dataclass(frozen=True, slots=True)
class _BatchPosition:
    """Where a run stands in its data, with the numbers that give the position its meaning."""

    epoch: int
    used: int  # batches of this epoch, on each rank
    finished: bool  # every batch of the epoch was used
    batch_samples: int  # of one batch on all ranks; 0 if the loader does not say
    world: int
    samples: int  # of the dataset; 0 if unknown
    seed: int


class Batches:
    """The batches of a DataLoader, with the epoch and the position in it. Add it to the state, and iterate over it:

        batches = holdfast.Batches(loader)
        state = {"model": model, "optimizer": optimizer, "random": holdfast.RandomStreams(), "batches": batches}
        with holdfast.Checkpointer("runs/a") as ck:
            step = ck.restore(state) or 0
            for epoch in range(batches.epoch, epochs):
                for batch in batches:
                    ...
                    step += 1
                    ck.save_if_due(step, state)

    An iteration is one epoch. After a restore it begins with the batch that comes next, and reads nothing of those
    before. The epoch of a `DistributedSampler`, or of any sampler with `set_epoch`, is set. An iteration that was left
    with `break` goes on where it was; `end_epoch` leaves out the rest of an epoch.

    Nothing is drawn from the global random streams, so that those of the model go on as they were. The order of
    `shuffle=True` depends on the epoch and a seed: `seed`, or that of the loader's generator, or the one that the
    program gave `torch.manual_seed`. A restore takes over the seed that was saved. Transforms in workers draw numbers
    that depend on seed, epoch and batch; those in the main process draw from the global streams.

    Raises InvalidArgument for a loader that keeps its position itself, and Unsupported for an IterableDataset, for
    loaders with an `__iter__` of their own, and for samplers whose order Holdfast does not know.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int | None = None) -> None:
        self._loader = loader
        self._repeatable = RepeatableLoader(loader)
        self._seed = self._own_seed() if seed is None else int(seed)
        self._epoch = 0
        self._used = 0
        self._iteration: object = None

    @property
    def epoch(self) -> int:
        """The epoch to begin or go on with."""
        return self._epoch

    @property
    def used(self) -> int:
        """The batches of this epoch that were used."""
        return self._used

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._repeatable)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch, then begin the next one."""
        self._iteration = own = object()
        for batch in self._repeatable.epoch(self._seed, self._epoch, self._used):
            self._require_same_iteration(own)
            self._used += 1
            yield batch
        self._require_same_iteration(own)
        self.end_epoch()

    def end_epoch(self) -> None:
        """Begin the next epoch: the next iteration has all its batches."""
        self._epoch, self._used, self._iteration = self._epoch + 1, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the next batch is the one after those that were used."""
        return asdict(self._position())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position for the next iteration; raises Mismatch where it would be among other samples."""
        names = {field.name for field in fields(_BatchPosition)}
        if set(state) != names:
            raise Mismatch(f"batches: {', '.join(sorted(names ^ set(state)))}: not a state that Batches saved")
        saved = _BatchPosition(**state)
        self._used = self._same_samples(saved) if saved.used else 0
        self._epoch, self._seed, self._iteration = saved.epoch, saved.seed, None

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Refuse positions that differ between ranks: they belong to the data of these ranks."""
        raise Mismatch(
            f"batches: each of {len(states)} places had a position or an order of its own, and {world} ranks cannot "
            "share them: restore on as many ranks, or begin an epoch anew with ignore=['batches']. A dataset that "
            "all ranks share with a DistributedSampler goes on with any number of ranks"
        )

    def _position(self) -> _BatchPosition:
        return _BatchPosition(
            epoch=self._epoch,
            used=self._used,
            finished=0 < self._used == _length(self._repeatable),
            batch_samples=_batch_samples(self._loader, self._repeatable.sampler),
            world=_ranks()[1],
            samples=_length(self._loader.dataset),
            seed=self._seed,
        )

    def _own_seed(self) -> int:
        """Return the seed of the order: the loader's own where it draws, else one that is the same on all ranks."""
        if not self._repeatable.draws:
            return int(getattr(self._repeatable.sampler, "seed", 0))
        generator = self._loader.generator or getattr(self._repeatable.sampler, "generator", None)
        return int(torch.initial_seed() if generator is None else generator.initial_seed())

    def _same_samples(self, saved: _BatchPosition) -> int:
        """Return the number of live batches that hold the samples which the saved ones held."""
        live = self._position()
        if saved.samples != live.samples:
            raise Mismatch(
                f"batches: saved amid epoch {saved.epoch} of {saved.samples} samples, and the dataset has "
                f"{live.samples} now: give the same dataset, or a step saved at the end of an epoch"
            )
        if saved.finished:
            return len(self._repeatable)
        if saved.batch_samples == live.batch_samples and (live.batch_samples or saved.world == live.world):
            return saved.used
        samples = saved.used * saved.batch_samples
        if not samples or not live.batch_samples or samples % live.batch_samples:
            sizes = (
                f"{saved.used} batches of {saved.batch_samples or '?'} samples on {saved.world} ranks were used of "
                f"epoch {saved.epoch}; a batch has {live.batch_samples or '?'} samples now, on {live.world}"
            )
            raise Mismatch(
                f"batches: {sizes}, and the used samples are no whole number of these: choose a world and batch size "
                "that divide them, or a step saved at the end of an epoch"
            )
        if _ranks()[0] == 0:
            warn(
                f"batches: saved with {saved.batch_samples} samples a step, now {live.batch_samples}: goes on after "
                f"the {samples} samples that were used; the learning rate and the number of steps are not adapted"
            )
        return samples // live.batch_samples

    def _require_same_iteration(self, own: object) -> None:
        if self._iteration is not own:
            raise InvalidArgument(
                "batches: restored, ended or iterated again while an iteration went on: leave its loop, then iterate"
            )


def _batch_samples(loader: DataLoader[Any], sampler: Any) -> int:
    """Return the samples of a batch on all ranks together; 0 if the loader does not say."""
    one = 1 if loader.batch_sampler is None else loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0)
    return int(one or 0) * int(getattr(sampler, "num_replicas", 1))


def _length(data: Any) -> int:
    try:
        return len(data)
    except (AttributeError, TypeError, NotImplementedError):
        return 0


def _ranks() -> tuple[int, int]:
    initialized = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if initialized else (0, 1)
