"""Random masks: by default a number for each element from (seed, model, key) alone; or mergekit's one sequence."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_intdigest

from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import Ranks
from holdfast.merging.methods.base import Draws, TensorTask

_WORDS = 8  # of 32 bits in one block of Philox
_UNIT = 2.0**-24


class ElementDraws:
    """A number for each element, which depends on the seed, the model's name, the key and the element's position.

    Neither the order of keys and models, nor chunks, ranks and removed keys change it.
    """

    sequential = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def begin(self, task: TensorTask, number: int) -> None:
        """Do nothing: every number can be computed on its own."""

    def end_scans(self) -> None:
        """Do nothing."""

    def mask(
        self, task: TensorTask, number: int, start: int, count: int, probability: float | torch.Tensor
    ) -> torch.Tensor:
        words = self.words(task.names[number], task.key, start, count)
        if isinstance(probability, float):
            return torch.from_numpy(words < min(2**32 - 1, round(probability * 2**32)))
        uniform = torch.from_numpy((words >> np.uint32(8)).astype(np.float32)).mul_(_UNIT)
        return uniform < probability

    def words(self, name: str, key: str, start: int, count: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """Return `count` random words of 32 bits from position `start` on."""
        identity = xxh3_128_intdigest(json.dumps([self._seed, name, key]).encode())
        first = start // _WORDS
        blocks = -(-(start + count) // _WORDS) - first
        raw = np.random.Philox(key=identity, counter=first).random_raw(blocks * _WORDS // 2)
        return raw.astype("<u8", copy=False).view("<u4")[start - first * _WORDS :][:count]


class SequenceDraws:
    """The masks of mergekit: one sequence of torch's generator for all keys in alphabetical order, model by model.

    The scan passes the sequence once and remembers where each tensor's part of it begins.
    """

    sequential = True

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._begins: dict[tuple[str, int], torch.Tensor] = {}
        self._positions: dict[tuple[str, int], _SequencePosition] = {}
        self._scanning: tuple[str, int] | None = None
        self._lock = threading.Lock()

    def begin(self, task: TensorTask, number: int) -> None:
        self._scanning = task.key, number
        self._begins[task.key, number] = self._generator.get_state()

    def end_scans(self) -> None:
        self._scanning = None

    def mask(
        self, task: TensorTask, number: int, start: int, count: int, probability: float | torch.Tensor
    ) -> torch.Tensor:
        dtype = torch.bfloat16 if task.dtype == torch.bfloat16 else torch.float32
        if isinstance(probability, float):
            probability = torch.full((count,), probability, dtype=dtype)
        if self._scanning is not None:
            return torch.bernoulli(probability, generator=self._generator).bool()
        with self._lock:
            generator = self._generator_at((task.key, number), start, dtype)
            found = torch.bernoulli(probability, generator=generator).bool()
            self._positions[task.key, number].at = start + count
        return found

    def _generator_at(self, which: tuple[str, int], start: int, dtype: torch.dtype) -> torch.Generator:
        """Return a generator at the number of an element. Consecutive chunks continue where the last one ended."""
        known = self._positions.get(which)
        if known is None:
            known = self._positions[which] = _SequencePosition(self._begins[which])
        known.move(start, dtype)
        return known.generator


class _SequencePosition:
    """A place in one tensor's part of the sequence, and the place where the last chunk began."""

    def __init__(self, begin: torch.Tensor) -> None:
        self.generator = torch.Generator()
        self.generator.set_state(begin)
        self.at = 0
        self._begin = begin
        self._chunk = (0, begin)

    def move(self, start: int, dtype: torch.dtype) -> None:
        """Go to an element: on from here, or back to the start of the last chunk, or to the tensor's first element."""
        if start < self.at:
            self.at, state = self._chunk if self._chunk[0] <= start else (0, self._begin)
            self.generator.set_state(state)
        while self.at < start:
            count = min(start - self.at, 1 << 20)
            torch.bernoulli(torch.zeros(count, dtype=dtype), generator=self.generator)
            self.at += count
        self._chunk = start, self.generator.get_state()


def draws_of(rng: str, seed: int, ranks: Ranks) -> Draws:
    """Return the draws of a merge. Raises InvalidArgument for mergekit's sequence on several ranks."""
    if rng == "holdfast":
        return ElementDraws(seed)
    if ranks.world > 1:
        raise InvalidArgument('rng="mergekit" is one sequence over all keys: run one process, or use rng="holdfast"')
    return SequenceDraws(seed)
