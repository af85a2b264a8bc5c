"""In-place transposes: the tensor keeps its memory and changes its shape."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import Call, is_shard, whole
from holdfast.spmd.registry import Rule


def turn(call: Call) -> Any:
    """t_ and transpose_: each rank turns its own part, and the shards change dims with it."""
    tensor = call.values[0]
    first, second = (0, 1) if tensor.ndim == 2 else (0, 0)
    if "dim0" in call.names:
        first, second = call["dim0"] % tensor.ndim, call["dim1"] % tensor.ndim
    if not all(is_shard(place) or place.is_replicate() or place.is_partial() for place in tensor.placements):
        private.replace_contents(tensor, whole(tensor), [Replicate()] * call.mesh.ndim)
    turned = {first: second, second: first}
    places = [Shard(turned.get(p.dim, p.dim)) if is_shard(p) else p for p in tensor.placements]
    private.turn(call.op, tensor, private.local_of(tensor).transpose(first, second), places, call.values[1:])
    return tensor


RULES = [Rule("view", ("t_.default", "transpose_.default"), "every dim", "torch has no strategy", turn)]
