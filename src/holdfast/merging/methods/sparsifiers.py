"""Sparsification of deltas: keep the largest elements (TIES), random ones (DARE), or random ones by rank (DELLA)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument
from holdfast.merging.methods.base import ChunkReader, Draws, MethodParameter, TensorTask, chunk_ranges
from holdfast.merging.methods.magnitudes import LargestElements, largest_elements

_DENSITY = MethodParameter("density", "share of the changes to keep", 1.0, per_model=True)
_LEAST_NORM = 1e-7

Facts = Mapping[str, Any]  # of one delta: what a scan found


class Sparsifier:
    """Drops elements of deltas, and scales the rest if asked. Without a scan's facts it keeps all elements."""

    parameters: tuple[MethodParameter, ...] = (_DENSITY,)
    is_random = False

    def check(self, task: TensorTask, number: int) -> None:
        """Raise InvalidArgument if the parameters of an input make no sense."""
        density = task.per_input[number]["density"]
        if not 0 <= density <= 1:
            raise InvalidArgument(f"density {density} of {task.names[number]}: expected a number from 0 to 1")

    def unit(self, task: TensorTask) -> int:
        """Return how many consecutive elements must be known to drop any of them."""
        return 1

    def applies(self, task: TensorTask, number: int) -> bool:
        """Return True unless all elements are kept."""
        return bool(task.per_input[number]["density"] < 1)

    def needs_scan(self, task: TensorTask) -> bool:
        """Return True if elements cannot be chosen without the whole tensor."""
        return False

    def scan(self, task: TensorTask, number: int, reader: ChunkReader) -> Facts:
        """Return what `kept` needs of the whole tensor."""
        return {}

    def kept(
        self, task: TensorTask, number: int, facts: Facts, start: int, delta: torch.Tensor, draws: Draws
    ) -> torch.Tensor:
        """Return which elements of a chunk of a delta are kept."""
        raise NotImplementedError

    def sparsify(
        self, task: TensorTask, number: int, facts: Facts, start: int, delta: torch.Tensor, draws: Draws
    ) -> torch.Tensor:
        """Return a chunk of a delta with dropped elements set to 0, and scaled by the scan's factor."""
        work = delta.to(self.work_dtype(task))
        work = work * self.kept(task, number, facts, start, delta, draws).to(work.dtype)
        if "scale" in facts:
            work *= torch.tensor(facts["scale"], dtype=work.dtype)
        return work.to(delta.dtype)

    def work_dtype(self, task: TensorTask) -> torch.dtype:
        return task.dtype

    def scan_scale(
        self, task: TensorTask, number: int, facts: Facts, reader: ChunkReader, draws: Draws
    ) -> dict[str, float]:
        """Return the factor that restores the sum of the magnitudes, empty where there is nothing to restore."""
        before = after = 0.0
        for start, stop in chunk_ranges(task.elements, self.unit(task)):
            delta = read_delta(task, number, reader, start, stop)
            work = delta.to(self.work_dtype(task))
            kept = self.kept(task, number, facts, start, delta, draws)
            magnitudes = work.abs_().double()
            before += float(magnitudes.sum())
            after += float((magnitudes * kept).sum())
        sums = torch.tensor([before, after], dtype=torch.float64).to(self.work_dtype(task))
        if (sums < _LEAST_NORM).any():
            return {}
        return {"scale": float(sums[0] / sums[1])}


class LargestSparsifier(Sparsifier):
    """Keeps the elements of largest magnitude; among equal ones those that come first."""

    def needs_scan(self, task: TensorTask) -> bool:
        return True

    def scan(self, task: TensorTask, number: int, reader: ChunkReader) -> Facts:
        density = task.per_input[number]["density"]
        if density <= 0 or not task.elements:
            return {}
        count = max(1, int(density * task.elements))
        chunks = list(chunk_ranges(task.elements))
        found = largest_elements(lambda start, stop: read_delta(task, number, reader, start, stop), count, chunks)
        return {"threshold": found.threshold, "before": found.before}

    def kept(
        self, task: TensorTask, number: int, facts: Facts, start: int, delta: torch.Tensor, draws: Draws
    ) -> torch.Tensor:
        if "threshold" not in facts:
            return torch.zeros(len(delta), dtype=torch.bool)
        return LargestElements(facts["threshold"], facts["before"]).mask(delta, start)


class RandomSparsifier(Sparsifier):
    """Keeps each element with the same probability."""

    is_random = True

    def work_dtype(self, task: TensorTask) -> torch.dtype:
        return torch.float32 if task.dtype == torch.float16 else task.dtype

    def kept(
        self, task: TensorTask, number: int, facts: Facts, start: int, delta: torch.Tensor, draws: Draws
    ) -> torch.Tensor:
        return draws.mask(task, number, start, len(delta), float(task.per_input[number]["density"]))


class RankedSparsifier(RandomSparsifier):
    """Keeps an element with a probability that grows with the rank of its magnitude in its row."""

    parameters = (_DENSITY, MethodParameter("epsilon", "half of the range of the probabilities", 0.15, per_model=True))

    def check(self, task: TensorTask, number: int) -> None:
        super().check(task, number)
        density, epsilon = (task.per_input[number][name] for name in ("density", "epsilon"))
        if 0 < density < 1 and not 0 < density - epsilon <= density + epsilon < 1:
            raise InvalidArgument(
                f"density {density} and epsilon {epsilon} of {task.names[number]}: density - epsilon and density + "
                "epsilon must be between 0 and 1"
            )

    def unit(self, task: TensorTask) -> int:
        return max(1, task.elements if len(task.shape) < 2 else math.prod(task.shape[1:]))

    def kept(
        self, task: TensorTask, number: int, facts: Facts, start: int, delta: torch.Tensor, draws: Draws
    ) -> torch.Tensor:
        density, epsilon = (float(task.per_input[number][name]) for name in ("density", "epsilon"))
        if density <= 0:
            return torch.zeros(len(delta), dtype=torch.bool)
        shape = (1, -1) if len(task.shape) < 2 else (-1, *task.shape[1:])
        probabilities = _by_rank(delta.abs().reshape(shape), density, epsilon, self.work_dtype(task))
        return draws.mask(task, number, start, len(delta), probabilities.flatten())


def _by_rank(magnitudes: torch.Tensor, density: float, epsilon: float, dtype: torch.dtype) -> torch.Tensor:
    """Return probabilities from density - epsilon for the smallest to density + epsilon for the largest, by row."""
    order = magnitudes.argsort(dim=1, stable=True)
    ranks = torch.empty_like(order)
    places = torch.arange(magnitudes.shape[1]).reshape(1, -1, *[1] * (magnitudes.dim() - 2)).expand_as(order)
    ranks.scatter_(1, order, places)
    counted = ranks.to(dtype) + 1
    low, high = counted.amin(dim=1, keepdim=True), counted.amax(dim=1, keepdim=True)
    norm = ((counted - low) / (high - low)).clamp(0, 1).nan_to_num(0)
    return (density - epsilon) + norm * 2 * epsilon


def read_delta(task: TensorTask, number: int, reader: ChunkReader, start: int, stop: int) -> torch.Tensor:
    """Return a chunk of an input minus the base, rounded to the task's dtype."""
    assert task.base is not None
    base, other = reader.read(start, stop, [task.base, number])
    return other - base
