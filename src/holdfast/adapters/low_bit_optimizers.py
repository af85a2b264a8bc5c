"""Low-bit optimizers of torchao and bitsandbytes: the states before the first step, and shards without elements.

torchao quantizes the state of a parameter only if the local shard has at least 4096 elements and whole blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.adapters.weight_wrappers import local_tensor

_MODULE = "torchao.optim.adam"


def is_low_bit(optimizer: Any) -> bool:
    """Return True for torchao's Adam and AdamW with 8-bit, 4-bit or float8 states. Does not import torchao."""
    base = getattr(sys.modules.get(_MODULE), "_AdamBase", None)
    return base is not None and isinstance(optimizer, base)


def is_empty_beside_blocks(optimizer: Any, value: Any) -> bool:
    """Return True if this rank has no element of a state that other ranks may have quantized.

    torchao keeps a plain tensor for it, which would contradict theirs.
    """
    return isinstance(value, DTensor) and not local_tensor(value).numel() and is_low_bit(optimizer)


@dataclass(slots=True)
class MixedStates:
    """The sharded states that a rank quantizes, and those that it does not, by group and key."""

    blocks: list[tuple[str, str]] = field(default_factory=list)
    plain: list[tuple[str, str]] = field(default_factory=list)

    def note(self, group: str, key: str, *, is_quantized: bool) -> None:
        (self.blocks if is_quantized else self.plain).append((group, key))

    def fields(self) -> Any:
        """Return the JSON form."""
        return [self.blocks, self.plain]


def mixed_states(answers: Sequence[Any]) -> frozenset[tuple[str, str]]:
    """Return the states that some ranks quantize and others do not, as their shards differ in size."""
    blocks = {(group, key) for own, _ in answers for group, key in own}
    return frozenset((group, key) for _, own in answers for group, key in own if (group, key) in blocks)


def initial_states(optimizer: Any, param: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the states that the first step of a low-bit optimizer would make; {} for any other optimizer."""
    if not param.requires_grad:
        return {}
    if _is_bitsandbytes(optimizer):
        return _bitsandbytes_states(optimizer, param)
    if not is_low_bit(optimizer):
        return {}
    signed = {"exp_avg": True, "exp_avg_sq": False} | ({"max_exp_avg_sq": False} if options.get("amsgrad") else {})
    buffers = {name: optimizer._new_buffer(param.detach(), signed[name]) for name in signed}
    return {"step": torch.tensor(0.0), **buffers}


def _is_bitsandbytes(optimizer: Any) -> bool:
    base = getattr(sys.modules.get("bitsandbytes.optim.optimizer"), "Optimizer8bit", None)
    return base is not None and isinstance(optimizer, base)


def _bitsandbytes_states(optimizer: Any, param: torch.Tensor) -> dict[str, Any]:
    """Return new states from the optimizer's own code, which knows their blocks and whether they are paged."""
    optimizer.check_overrides()
    for number, group in enumerate(optimizer.param_groups):
        for index, own in enumerate(group["params"]):
            if own is param:
                optimizer.init_state(group, param, number, index)
                return dict(optimizer.state.pop(param))
    raise AssertionError("the optimizer does not hold the parameter")
