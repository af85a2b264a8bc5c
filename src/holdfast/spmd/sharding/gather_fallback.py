"""The fallback without a rule or a decision: gather, run on full tensors, write back in-place results; counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.spmd_errors import UnsupportedCall
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, replicated
from holdfast.spmd.sharding.norm_partials import reduce_in_place
from holdfast.spmd.sharding.partials import overwrite, reduce_partials, reduced_placements


@dataclass(slots=True)
class GatheredCalls:
    """The calls of one operator that ran on full tensors: how many, and the inputs of the first."""

    calls: int
    first: str


GATHERED: dict[str, GatheredCalls] = {}  # by operator, for report()


def gather_and_run(call: Call) -> Any:
    """Run the call on full tensors, which is right for every operator; results are replicated.

    An error of the operator itself (an index out of range) is equal on all ranks, since all have the same input.
    """
    _count(call)
    if _written(call):
        return _inplace(call)
    tensors = {slot: _gathered(tensor) for slot, tensor in call.tensor_args()}
    return replicated(call.run(tensors), call.mesh)


def _gathered(tensor: Any) -> torch.Tensor:
    """Return the full tensor. A Partial is reduced as comparisons reduce it: gradients may compare it with a result."""
    return full_tensor(reduce_partials(tensor))


def _count(call: Call) -> None:
    entry = GATHERED.get(str(call.op))
    if entry is not None:
        entry.calls += 1
        return
    tensors = [tensor for _, tensor in call.tensor_args() if isinstance(tensor, DTensor)]
    inputs = (f"{list(tensor.shape)} as {', '.join(map(str, tensor.placements))}" for tensor in tensors)
    GATHERED[str(call.op)] = GatheredCalls(1, "; ".join(inputs))


# Arguments that are written though the schema does not say so.
UNDECLARED_WRITES = {"aten::native_batch_norm": ("running_mean", "running_var")}


def _written(call: Call) -> set[tuple[int, ...]]:
    """Return the positions of the arguments that a call writes."""
    undeclared = UNDECLARED_WRITES.get(call.op._schema.name, ())
    return {
        (position,)
        for position, argument in enumerate(call.op._schema.arguments)
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write)
    }


def _inplace(call: Call) -> Any:
    """Run on full copies, then write each rank's part back. A plain tensor is written itself."""
    written = _written(call)
    tensors = {}
    for slot, tensor in call.tensor_args():
        everything = _gathered(tensor)
        shares = not isinstance(tensor, DTensor) or everything is local_of(tensor)
        tensors[slot] = everything.clone() if slot in written and not shares else everything
    result = call.run(tensors)
    for slot, tensor in call.tensor_args():
        if (slot in written or slot[:1] in written) and isinstance(tensor, DTensor):
            if tensors[slot].shape != tensor.shape:
                raise UnsupportedCall(
                    f"{call.op} would change the shape of a DTensor in place, from {tuple(tensor.shape)} to "
                    f"{tuple(tensors[slot].shape)}: use the form without _"
                )
            write_back(tensor, tensors[slot])
    return _returned(call, result)


def write_back(tensor: DTensor, contents: torch.Tensor) -> None:
    """Write `contents`, which every rank has, into `tensor` without moving it."""
    if local_of(tensor) is not contents:
        reduce_in_place(tensor)
        overwrite(tensor, local_part(contents, reduced_placements(tensor), tensor.device_mesh))


def _returned(call: Call, result: Any) -> Any:
    """Return the tensors that an in-place call was given."""
    returned = [
        tensor
        for argument, tensor in zip(call.op._schema.arguments, call.values, strict=True)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = call.op._schema.returns
    if not returns:
        return None
    if len(returns) > 1 or returns[0].alias_info is None:  # the call writes one tensor and returns another
        return replicated(result, call.mesh)
    return returned[0]
