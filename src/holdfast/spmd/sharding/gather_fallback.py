"""What is done where torch has no way at all: gather, compute everywhere, and keep what an in-place call must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, moved, replicated, whole
from holdfast.spmd.base.spmd_errors import UnsupportedCall
from holdfast.spmd.sharding.partials import overwrite, reduced_places


@dataclass(slots=True)
class Gathered:
    """The calls of one operator that were run on whole tensors: how many, and the inputs of the first."""

    calls: int
    first: str


GATHERED: dict[str, Gathered] = {}  # by operator, for report()


def gather_and_run(call: Call) -> Any:
    """The call on whole tensors: always right, whatever the operator; results are replicated.

    An error of the operator itself (an index out of range) is the same on all ranks, since all have the same input.
    """
    _note(call)
    if _written(call):
        return _inplace(call)
    tensors = {spot: whole(tensor) for spot, tensor in call.spots()}
    return replicated(call.run(tensors), call.mesh)


def _note(call: Call) -> None:
    found = GATHERED.get(str(call.op))
    if found is not None:
        found.calls += 1
        return
    tensors = [tensor for _, tensor in call.spots() if isinstance(tensor, DTensor)]
    inputs = (f"{list(tensor.shape)} as {', '.join(map(str, tensor.placements))}" for tensor in tensors)
    GATHERED[str(call.op)] = Gathered(1, "; ".join(inputs))


# What these write into, their schemas do not say.
UNSAID = {"aten::native_batch_norm": ("running_mean", "running_var")}


def _written(call: Call) -> set[tuple[int, ...]]:
    """The positions of the arguments that a call writes into."""
    unsaid = UNSAID.get(call.op._schema.name, ())
    return {
        (position,)
        for position, argument in enumerate(call.op._schema.arguments)
        if argument.name in unsaid or (argument.alias_info is not None and argument.alias_info.is_write)
    }


def _inplace(call: Call) -> Any:
    """Run on whole copies, then put each rank's part back into what was written to."""
    written = _written(call)
    tensors = {}
    for spot, tensor in call.spots():
        everything = whole(tensor)
        shares = isinstance(tensor, DTensor) and everything is private.local_of(tensor)
        tensors[spot] = everything.clone() if spot in written and not shares else everything
    result = call.run(tensors)
    for spot, tensor in call.spots():
        if (spot in written or spot[:1] in written) and isinstance(tensor, DTensor):
            if tensors[spot].shape != tensor.shape:
                raise UnsupportedCall(
                    f"{call.op} would change the shape of a DTensor in place, from {tuple(tensor.shape)} to "
                    f"{tuple(tensors[spot].shape)}: use the form without _"
                )
            put_back(tensor, tensors[spot])
    return _originals(call, result)


def put_back(tensor: DTensor, contents: torch.Tensor) -> None:
    """Make `tensor` hold `contents`, which every rank has, where it lies."""
    if private.local_of(tensor) is not contents:
        overwrite(tensor, moved(contents, reduced_places(tensor), tensor.device_mesh))


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
