"""`model_stock`: between the average of the models and the base, by the angles between their deltas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.merging.methods.base import ChunkReader, Draws, MergeMethod, MethodParameter, TensorTask, chunk_ranges
from holdfast.merging.methods.sparsifiers import read_delta

_LEAST_NORM = 1e-6


class ModelStockMerge(MergeMethod):
    """The average of the models, drawn to the base by as much as their deltas disagree."""

    name = "model_stock"
    about = "average, drawn to the base where models disagree"
    parameters = (MethodParameter("filter_wise", "one ratio for each row instead of one for each tensor", False),)
    needs_base = True
    least = 3

    def unit(self, task: TensorTask) -> int:
        return max(1, task.shape[-1]) if task.shared["filter_wise"] and task.shape else 1

    def needs_scan(self, task: TensorTask) -> bool:
        return not task.shared["filter_wise"]

    def scan(self, task: TensorTask, reader: ChunkReader, draws: Draws) -> Any:
        """Return the ratio of the average."""
        pairs = list(itertools.combinations(range(len(task.others)), 2))
        squares, products = [0.0] * len(task.others), [0.0] * len(pairs)
        for start, stop in chunk_ranges(task.elements):
            deltas = [read_delta(task, number, reader, start, stop) for number in task.others]
            for number, delta in enumerate(deltas):
                squares[number] += float(delta.double().square_().sum())
            for number, (first, second) in enumerate(pairs):
                products[number] += float((deltas[first] * deltas[second]).double().sum())
        norms = torch.tensor([math.sqrt(square) for square in squares], dtype=torch.float64).to(task.dtype)
        sums = torch.tensor(products, dtype=torch.float64).to(task.dtype)
        cosines = [_cosine(sums[number], norms[a] * norms[b]) for number, (a, b) in enumerate(pairs)]
        return float(_ratio(cosines, len(task.others)))

    def merge(
        self, task: TensorTask, scanned: Any, start: int, tensors: Sequence[torch.Tensor], draws: Draws
    ) -> torch.Tensor:
        assert task.base is not None
        rows = (-1, self.unit(task))
        base, others = tensors[task.base].reshape(rows), [tensors[number].reshape(rows) for number in task.others]
        if task.shared["filter_wise"]:
            ratio = _ratios_of_rows(base, others)
        else:
            ratio = torch.tensor([scanned], dtype=task.dtype)
        average = others[0]
        for other in others[1:]:
            average = average + other
        average = average / len(others)
        return (ratio * average + (1 - ratio) * base).flatten()


def _ratios_of_rows(base: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    deltas = [other - base for other in others]
    cosines = [
        _cosine((a * b).sum(dim=-1), torch.norm(a, dim=-1) * torch.norm(b, dim=-1))
        for a, b in itertools.combinations(deltas, 2)
    ]
    return _ratio(cosines, len(others)).unsqueeze(-1)


def _cosine(product: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    return (product / norms.clamp(min=_LEAST_NORM)).clamp(-1, 1)


def _ratio(cosines: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Return the ratio of the average; 0, which is the base, where there is no finite one."""
    cosine = torch.stack(list(cosines)).mean(dim=0)
    denominator = 1 + (count - 1) * cosine
    singular = denominator.abs() < _LEAST_NORM
    safe = torch.where(singular, torch.ones_like(denominator), denominator)
    return torch.where(singular, torch.zeros_like(cosine), count * cosine / safe)
