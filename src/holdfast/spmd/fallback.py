"""What is done where torch has no way at all: gather, compute everywhere, and keep what an in-place call must keep."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.core.errors import Unsupported
from holdfast.spmd import torch_private as private
from holdfast.spmd.call import Call, moved, replicated, whole


def gather_and_run(call: Call) -> Any:
    """The call on whole tensors: always right, whatever the operator; results are replicated.

    An error of the operator itself (an index out of range) is the same on all ranks, since all have the same input.
    """
    if call.is_inplace:
        return _inplace(call)
    tensors = {spot: whole(tensor) for spot, tensor in call.spots()}
    return replicated(call.run(tensors), call.mesh)


def _inplace(call: Call) -> Any:
    """Run on whole copies, then put each rank's part back into what was written to."""
    written = {
        (position,)
        for position, argument in enumerate(call.op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    tensors = {}
    for spot, tensor in call.spots():
        everything = whole(tensor)
        shares = isinstance(tensor, DTensor) and everything is private.local_of(tensor)
        tensors[spot] = everything.clone() if spot in written and not shares else everything
    result = call.run(tensors)
    for spot, tensor in call.spots():
        if (spot in written or spot[:1] in written) and isinstance(tensor, DTensor):
            if tensors[spot].shape != tensor.shape:
                raise Unsupported(
                    f"{call.op} would change the shape of a DTensor in place, from {tuple(tensor.shape)} to "
                    f"{tuple(tensors[spot].shape)}: use the form without _"
                )
            put_back(tensor, tensors[spot])
    return _originals(call, result)


def put_back(tensor: DTensor, contents: torch.Tensor) -> None:
    """Make `tensor` hold `contents`, which every rank has, without changing its shards' places."""
    if private.local_of(tensor) is contents:
        return
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        kept = [Replicate() if isinstance(placement, Partial) else placement for placement in tensor.placements]
        if settle_base(tensor):
            private.local_of(tensor).copy_(moved(contents, kept, tensor.device_mesh))
            private.replace_contents(tensor, private.local_of(tensor), kept)
            return
        private.replace_contents(tensor, moved(contents, kept, tensor.device_mesh).clone(), kept)
        return
    private.local_of(tensor).copy_(moved(contents, tensor.placements, tensor.device_mesh))


def settle_base(view: DTensor) -> bool:
    """Where a view of a Partial is written: reduce what it is a view of, in the memory that both have."""
    base = view._base
    if not isinstance(base, DTensor) or not any(isinstance(place, Partial) for place in base.placements):
        return False
    places = [Replicate() if isinstance(place, Partial) else place for place in base.placements]
    local = private.local_of(base)
    local.copy_(moved(base, places, base.device_mesh))
    private.replace_contents(base, local, places)
    return True


def _originals(call: Call, result: Any) -> Any:
    """An in-place call returns the tensors that it was given."""
    returned = [
        tensor
        for argument, tensor in zip(call.op._schema.arguments, call.values, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = call.op._schema.returns
    if not returns:
        return None
    if len(returns) > 1 or returns[0].alias_info is None:  # it writes into one tensor and returns another
        return replicated(result, call.mesh)
    return returned[0]
