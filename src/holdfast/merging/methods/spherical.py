"""`slerp`: interpolation between two models on the sphere, as vectors of all elements of a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.merging.methods.base import ChunkReader, Draws, MergeMethod, MethodParameter, TensorTask, chunk_ranges

_PARALLEL = 0.9995  # a larger cosine: interpolate linearly
_LEAST_NORM = 1e-8


class SlerpMerge(MergeMethod):
    """Spherical interpolation from the base (t=0) to the other model (t=1); linear where they are parallel."""

    name = "slerp"
    about = "spherical interpolation between two models"
    parameters = (MethodParameter("t", "position between the base (0) and the other model (1)"),)
    needs_base = True
    least = most = 2

    def needs_scan(self, task: TensorTask) -> bool:
        return True

    def scan(self, task: TensorTask, reader: ChunkReader, draws: Draws) -> Any:
        """Return the factors of the base and of the other model."""
        first = second = product = 0.0
        for start, stop in chunk_ranges(task.elements):
            a, b = (chunk.double() for chunk in reader.read(start, stop, [task.base or 0, task.others[0]]))
            first += float(a.dot(a))
            second += float(b.dot(b))
            product += float(a.dot(b))
        norms = [norm if norm > _LEAST_NORM else 1.0 for norm in (math.sqrt(first), math.sqrt(second))]
        t = float(task.shared["t"])
        cosine = min(1.0, max(-1.0, product / norms[0] / norms[1]))
        if abs(cosine) > _PARALLEL or math.isnan(cosine):
            return [1 - t, t]
        angle = math.acos(cosine)
        return [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)]

    def merge(
        self, task: TensorTask, scanned: Any, start: int, tensors: Sequence[torch.Tensor], draws: Draws
    ) -> torch.Tensor:
        exact = torch.float64 if task.dtype == torch.float64 else torch.float32
        base, other = (tensors[number].to(exact) for number in (task.base or 0, task.others[0]))
        of_base, of_other = (float(factor) for factor in scanned)
        return (base * of_base + other * of_other).to(task.dtype)
