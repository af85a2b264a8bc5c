"""torchao's low-bit optimizers: the states of a parameter before the first step, and shards without elements.

torchao quantizes the state of a parameter only if the local shard has at least 4096 elements and whole blocks.
"""

from __future__ import annotations

import sys
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


def initial_states(optimizer: Any, param: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the states that the first step of a low-bit optimizer would make; {} for any other optimizer."""
    if not is_low_bit(optimizer) or not param.requires_grad:
        return {}
    signed = {"exp_avg": True, "exp_avg_sq": False} | ({"max_exp_avg_sq": False} if options.get("amsgrad") else {})
    buffers = {name: optimizer._new_buffer(param.detach(), signed[name]) for name in signed}
    return {"step": torch.tensor(0.0), **buffers}
