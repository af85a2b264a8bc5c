"""The position in a data loader that accelerate prepared: its epoch and batch, and what the order depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, SeedableRandomSampler, get_sampler
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler

from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from holdfast.core.warnings import warn
from holdfast.integrations.worker_seeds import seed_apart


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Where a loader stands, with the numbers that give the position its meaning."""

    epoch: int
    batches: int  # of this epoch, on each rank
    batch_samples: int  # of one batch on all ranks; 0 if unknown
    samples: int  # of the dataset; 0 if unknown
    seed: int | None  # of a SeedableRandomSampler
    finished: bool  # every batch of the epoch was used

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in self.__slots__}


class CountedLoader:
    """A prepared loader and how many batches of its epoch were used."""

    def __init__(self, loader: Any, name: str) -> None:
        self.loader = loader
        self.name = name
        self.batches = 0

    def position(self) -> LoaderPosition:
        return LoaderPosition(
            epoch=int(getattr(self.loader, "iteration", 0)),
            batches=self.batches,
            batch_samples=_batch_samples(self.loader),
            samples=_samples(self.loader),
            seed=_seed(self.loader),
            finished=0 < self.batches == _length(self.loader),
        )

    def go_to(self, saved: LoaderPosition) -> None:
        """Set the position for the next iteration; raises Mismatch where it would be among other samples."""
        batches = self._same_batches(saved) if saved.batches else 0
        self.batches = batches
        if hasattr(self.loader, "iteration"):
            self.loader.iteration = saved.epoch
        if saved.epoch or saved.batches:
            seed_apart(self.loader)
        sampler = _sampler(self.loader)
        if isinstance(sampler, SeedableRandomSampler) and saved.seed is not None:
            sampler.initial_seed = saved.seed

    def _same_batches(self, saved: LoaderPosition) -> int:
        """Return the number of batches that hold the samples which the saved batches held."""
        live = self.position()
        if saved.samples != live.samples:
            raise Mismatch(
                f"{self.name}: saved amid epoch {saved.epoch} of {saved.samples} samples, and the dataset has "
                f"{live.samples} now: give the same dataset, or a step saved at the end of an epoch"
            )
        if saved.finished:
            return _length(self.loader)
        if saved.batch_samples == live.batch_samples:
            return saved.batches
        used = saved.batches * saved.batch_samples
        if not live.batch_samples or used % live.batch_samples:
            raise Mismatch(
                f"{self.name}: {saved.batches} batches of {saved.batch_samples} samples were used of epoch "
                f"{saved.epoch}, {used} samples in all, which are no whole number of batches of {live.batch_samples}: "
                "choose a world and batch size that divide them, or a step saved at the end of an epoch"
            )
        warn(
            f"{self.name}: saved with {saved.batch_samples} samples a step, now {live.batch_samples}: goes on after "
            f"the {used} samples that were used; the learning rate and the number of steps are not adapted"
        )
        return used // live.batch_samples

    def require_repeatable(self) -> None:
        """Raise unless the order of an epoch depends on the epoch alone, so that batches can be skipped."""
        loader = self.loader
        if isinstance(loader.dataset, IterableDataset):
            raise Unsupported(
                f"{self.name}: its dataset is iterable, and Holdfast cannot skip in it: iterate the loader itself, "
                "and register an object that keeps its position with accelerator.register_for_checkpointing"
            )
        if type(loader) is not DataLoaderShard:
            raise Unsupported(
                f"{self.name}: a {type(loader).__name__} is not supported: pass "
                "DataLoaderConfiguration(dispatch_batches=False)"
            )
        if loader.use_stateful_dataloader:
            raise Unsupported(
                f"{self.name}: accelerate's own position of a StatefulDataLoader is wrong after the first epoch: "
                "pass DataLoaderConfiguration(use_stateful_dataloader=False); `batches` counts by itself"
            )
        _check_order(loader, self.name)


def _check_order(loader: Any, name: str) -> None:
    outer = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    while isinstance(outer, BatchSamplerShard):
        outer = outer.batch_sampler
    sampler = outer.sampler if type(outer) is BatchSampler else outer
    known = isinstance(sampler, SequentialSampler | SeedableRandomSampler)
    if known or hasattr(sampler, "set_epoch") or outer is None:
        return
    if type(sampler).__name__ == "RandomSampler":
        raise InvalidArgument(
            f"{name}: shuffles by random numbers that a resumed run cannot draw again: pass "
            "Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))"
        )
    raise Unsupported(
        f"{name}: the order of its {type(sampler).__name__} is not known to depend on the epoch alone: give it a "
        "method set_epoch(epoch) that determines the order"
    )


def _sampler(loader: Any) -> Any:
    return None if isinstance(loader.dataset, IterableDataset) else get_sampler(loader)


def _seed(loader: Any) -> int | None:
    sampler = _sampler(loader)
    return int(sampler.initial_seed) if isinstance(sampler, SeedableRandomSampler) else None


def _batch_samples(loader: Any) -> int:
    try:
        return int(loader.total_batch_size)
    except (AttributeError, TypeError):  # a loader without a batch size, or of batches that differ
        return 0


def _samples(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return 0


def _length(loader: Any) -> int:
    try:
        return len(loader)
    except (AttributeError, TypeError):
        return 0
