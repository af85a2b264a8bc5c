"""Weight wrappers of quantized training: subclasses that hold a weight as it is and change only how it is multiplied.

Such a wrapper is saved and loaded as the weight inside. A checkpoint therefore does not depend on whether
the model trains with float8 matmuls, and other tools can open it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

PLAIN = (torch.Tensor, torch.nn.Parameter)  # the classes of tensors that wrap nothing
# By library and class name: the attribute that holds the weight. Classes of torchao are not imported here.
_WEIGHTS = {
    ("torchao", "WeightWithDynamicFloat8CastTensor"): "_tensor",
    ("torchao", "Int8MixedPrecisionTrainingLinearWeight"): "_data",
    ("torchao", "BitNetTrainingLinearWeight"): "_data",
    ("torchao", "TrainingWeightWrapperBaseTensor"): "_data",
    ("torchao", "AffineFakeQuantizedTensor"): "original_tensor",
}
_known: dict[type, str | None] = {}


def local_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return the local tensor that holds this rank's elements: of a DTensor, and inside of a weight wrapper."""
    if type(value) in PLAIN:
        return value
    local: torch.Tensor = value._local_tensor if isinstance(value, DTensor) else value
    attribute = _attribute(type(local))
    return local if attribute is None else local_tensor(getattr(local, attribute))


def has_scale(value: torch.Tensor) -> bool:
    """Return True for a weight wrapper with a scale that it computed from its weight.

    torchao's precompute_float8_dynamic_scale_for_fsdp sets one after each optimizer step.
    """
    local: Any = value._local_tensor if isinstance(value, DTensor) else value
    return _attribute(type(local)) is not None and getattr(local, "_precomputed_scale", None) is not None


def forget_scale(value: torch.Tensor) -> None:
    """Drop the scale of the weight that a wrapper held before a load; it computes the next one from the weight."""
    local: Any = value._local_tensor if isinstance(value, DTensor) else value
    local._precomputed_scale = None


def _attribute(kind: type) -> str | None:
    """Return the attribute in which a class holds the weight; None for a class that is no weight wrapper."""
    if kind in PLAIN:
        return None
    if kind not in _known:
        names = ((base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__)
        _known[kind] = next((_WEIGHTS[name] for name in names if name in _WEIGHTS), None)
    return _known[kind]
