"""Methods that add deltas to a base: task_arithmetic, ties, dare_linear, dare_ties, della and della_linear.

A delta is a model minus the base. The steps and their roundings are those of mergekit's generalized task arithmetic,
so that results are the same to the last bit: deltas are rounded to the dtype, weighted, and summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.merging.methods.base import ChunkReader, Draws, MergeMethod, MethodParameter, TensorTask
from holdfast.merging.methods.sparsifiers import (
    LargestSparsifier,
    RandomSparsifier,
    RankedSparsifier,
    Sparsifier,
)

_LEAST_DIVISOR = 1e-8


class TaskVectors(MergeMethod):
    """The base plus a weighted sum of deltas: sparsified or not, with or without agreement on the sign."""

    needs_base = True

    def __init__(
        self, name: str, about: str, sparsifier: Sparsifier | None, *, by_sign: bool, normalize: bool, rescale: bool
    ) -> None:
        self.name = name
        self.about = about
        self._sparsifier = sparsifier
        self._by_sign = by_sign
        self.parameters = (
            MethodParameter("weight", "weight of a model", per_model=True),
            MethodParameter("normalize", "divide by the sum of the weights", normalize),
            MethodParameter("lambda", "factor of the sum of the deltas", 1.0),
        )
        if sparsifier is not None:
            rescaling = MethodParameter("rescale", "restore the sum of the magnitudes of a sparsified delta", rescale)
            self.parameters += (*sparsifier.parameters, rescaling)

    def check(self, task: TensorTask) -> None:
        if self._sparsifier is not None:
            for number in task.others:
                self._sparsifier.check(task, number)

    def unit(self, task: TensorTask) -> int:
        return 1 if self._sparsifier is None else self._sparsifier.unit(task)

    def _sparse(self, task: TensorTask) -> list[int]:
        """Return the inputs that are sparsified."""
        sparsifier = self._sparsifier
        return [] if sparsifier is None else [number for number in task.others if sparsifier.applies(task, number)]

    def is_random(self, task: TensorTask) -> bool:
        return self._sparsifier is not None and self._sparsifier.is_random and bool(self._sparse(task))

    def needs_scan(self, task: TensorTask) -> bool:
        sparsifier = self._sparsifier
        if sparsifier is None or not self._sparse(task):
            return False
        return bool(task.shared["rescale"]) or sparsifier.needs_scan(task)

    def scan(self, task: TensorTask, reader: ChunkReader, draws: Draws) -> Any:
        assert self._sparsifier is not None
        found: dict[str, Any] = {}
        for number in self._sparse(task):
            facts = dict(self._sparsifier.scan(task, number, reader))
            draws.begin(task, number)
            if task.shared["rescale"] or (draws.sequential and self._sparsifier.is_random):
                scale = self._sparsifier.scan_scale(task, number, facts, reader, draws)
                facts |= scale if task.shared["rescale"] else {}
            found[str(number)] = facts
        return found

    def merge(
        self, task: TensorTask, scanned: Any, start: int, tensors: Sequence[torch.Tensor], draws: Draws
    ) -> torch.Tensor:
        assert task.base is not None
        base = tensors[task.base]
        if not task.others:
            return base
        sparse = set(self._sparse(task))
        weights = torch.tensor([float(task.per_input[n]["weight"]) for n in task.others], dtype=task.dtype)
        deltas = []
        for number, weight in zip(task.others, weights, strict=True):
            delta = tensors[number] - base
            if number in sparse:
                assert self._sparsifier is not None
                facts = (scanned or {}).get(str(number), {})
                delta = self._sparsifier.sparsify(task, number, facts, start, delta, draws)
            deltas.append(delta.mul_(weight))
        mixed, divisor = _agreeing(deltas, weights) if self._by_sign else _all(deltas, weights)
        if task.shared["normalize"]:
            mixed /= divisor
        if task.shared["lambda"] != 1:
            mixed *= task.shared["lambda"]
        return base + mixed


def _all(deltas: Sequence[torch.Tensor], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the deltas and of the weights."""
    divisor = weights.reshape(-1, 1).sum(dim=0)
    divisor.masked_fill_(divisor.abs() < _LEAST_DIVISOR, 1)
    return _sum(deltas), divisor


def _agreeing(deltas: Sequence[torch.Tensor], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each element, the sum of the deltas with the sign of the majority, and of their weights."""
    positive = _sum(deltas) >= 0
    negative = ~positive
    masks = [((delta > 0) & positive) | ((delta < 0) & negative) for delta in deltas]  # faster than where
    divisor = _sum([weight * mask for weight, mask in zip(weights, masks, strict=True)])
    divisor.masked_fill_(divisor == 0, 1)
    return _sum([delta.mul_(mask) for delta, mask in zip(deltas, masks, strict=True)]), divisor


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum in order, computed in float32 at least and rounded once."""
    dtype = tensors[0].dtype
    exact = dtype if dtype == torch.float64 else torch.float32
    total = torch.zeros(tensors[0].shape, dtype=exact)
    for tensor in tensors:
        total += tensor
    return total.to(dtype)


def task_vector_methods() -> tuple[TaskVectors, ...]:
    """Return the methods of this family."""
    largest, random, ranked = LargestSparsifier(), RandomSparsifier(), RankedSparsifier()

    def method(name: str, about: str, sparsifier: Sparsifier | None, **options: bool) -> TaskVectors:
        return TaskVectors(name, about, sparsifier, **{"by_sign": False, "normalize": False, **options})

    return (
        method("task_arithmetic", "base plus weighted deltas", None, rescale=False),
        method("ties", "largest changes that agree in sign", largest, by_sign=True, normalize=True, rescale=False),
        method("dare_linear", "randomly dropped changes", random, rescale=True),
        method("dare_ties", "randomly dropped changes that agree in sign", random, by_sign=True, rescale=True),
        method("della", "changes dropped by rank, that agree", ranked, by_sign=True, normalize=True, rescale=True),
        method("della_linear", "changes dropped by rank", ranked, rescale=True),
    )
