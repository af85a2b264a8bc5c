"""One epoch of a DataLoader from a given batch on, with the random streams of the run that never stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from holdfast.core.warnings import warn
from holdfast.integrations.skipping import without_first
from holdfast.random_streams import RandomStreams


class SkippingLoader:
    """Stands in for the DataLoader inside accelerate's: leaves out indices, nothing is read for them.

    accelerate fetches one batch ahead. At a save the next batch has been fetched already, with random numbers that
    transforms in the main process drew before those of the model. So the streams before each fetch are kept too:
    a resumed epoch fetches its first batch with these, and goes on with the streams of the save.
    """

    def __init__(self, base: DataLoader[Any], skipped: int, before_fetch: RandomStreams, streams: RandomStreams):
        self._base = base
        self._skipped = skipped
        self._before_fetch = before_fetch
        self._streams = streams
        self.opened = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self._base.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def __len__(self) -> int:
        return len(self._base)

    def __iter__(self) -> Iterator[Any]:
        self.opened = True
        if not self._skipped:
            yield from self._fetch(iter(self._base))
            return
        if self._base.num_workers:
            warn(
                f"goes on amid an epoch after {self._skipped} batches: random numbers that data workers draw are not "
                "those of the run that never stopped"
            )
        batches = iter(without_first(self._base, self._skipped))
        self._before_fetch.apply()
        first = next(batches, None)
        self._streams.apply()
        if first is not None:
            yield first
            yield from self._fetch(batches)

    def _fetch(self, batches: Iterator[Any]) -> Iterator[Any]:
        in_this_process = self._base.num_workers == 0
        while True:
            if in_this_process:
                self._before_fetch.load_state_dict(RandomStreams().state_dict())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
