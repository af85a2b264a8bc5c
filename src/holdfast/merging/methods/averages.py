"""`linear`, the weighted average, and `passthrough`, which copies one model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument
from holdfast.merging.methods.base import Draws, MergeMethod, MethodParameter, TensorTask

_STRIP_ELEMENTS = 1 << 16  # so that all steps of a strip find it in the cache of a core


class LinearMerge(MergeMethod):
    """The weighted average of the models, computed in float32 and rounded once."""

    name = "linear"
    about = "weighted average of models"
    parameters = (
        MethodParameter("weight", "weight of a model", 1.0, per_model=True, base_too=True),
        MethodParameter("normalize", "divide by the sum of the weights", True),
    )

    def check(self, task: TensorTask) -> None:
        if task.shared["normalize"] and not float(self._weights(task).sum()):
            raise InvalidArgument(
                f"linear: the weights of {task.key!r} add up to 0, and normalize divides by the sum; change the "
                "weights, or set normalize to false"
            )

    def _weights(self, task: TensorTask) -> torch.Tensor:
        exact = torch.float64 if task.dtype == torch.float64 else torch.float32
        return torch.tensor([[float(values["weight"]) for values in task.per_input]], dtype=exact)

    def merge(
        self, task: TensorTask, scanned: Any, start: int, tensors: Sequence[torch.Tensor], draws: Draws
    ) -> torch.Tensor:
        weights = self._weights(task)
        divisor, factors = weights.sum(dim=1), weights.unbind(1)
        divides = task.shared["normalize"] and divisor.item() != 1
        out = torch.empty_like(tensors[0])
        sums = torch.empty(min(_STRIP_ELEMENTS, len(out)), dtype=weights.dtype)
        exact = torch.empty_like(sums)
        for begin in range(0, len(out), _STRIP_ELEMENTS):
            strips = [tensor[begin : begin + _STRIP_ELEMENTS] for tensor in tensors]
            total, value = sums[: len(strips[0])].zero_(), exact[: len(strips[0])]
            for strip, weight in zip(strips, factors, strict=True):
                total.addcmul_(value.copy_(strip), weight)
            out[begin : begin + _STRIP_ELEMENTS].copy_(total.div_(divisor) if divides else total)
        return out


class PassthroughMerge(MergeMethod):
    """One model as it is, or multiplied by a scale; with layer ranges, layers of several models."""

    name = "passthrough"
    about = "copy one model, or layers of several models"
    parameters = (MethodParameter("scale", "factor of the weights", 1.0, per_model=True, base_too=True),)
    most = 1

    def merge(
        self, task: TensorTask, scanned: Any, start: int, tensors: Sequence[torch.Tensor], draws: Draws
    ) -> torch.Tensor:
        scale = task.per_input[0]["scale"]
        return tensors[0] if scale == 1 else tensors[0] * scale
