"""Calls with `out=`: run the operator without it, then write its results into the given tensors, as they are placed."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.spmd_errors import UnsupportedCall
from holdfast.spmd.sharding.local_parts import local_part
from holdfast.spmd.sharding.partials import overwrite, reduced_placements


def has_out(op: Any) -> bool:
    """Return True if an operator writes its results into arguments that take nothing else."""
    return any(argument.is_out for argument in op._schema.arguments)


def run_with_out(call: Call) -> Any:
    """Run without `out=` and write the results into `out`, which keeps its placements.

    torch would cache a decision for one placement of `out` and use it for all. USE_TORCH if there is no such form.
    """
    functional = _functional(call.op)
    slots = list(zip(call.op._schema.arguments, call.values, strict=True))
    outs = [value for argument, value in slots if argument.is_out]
    inputs = {argument.name: value for argument, value in slots if not argument.is_out}
    tensors = [tensor for out in outs for tensor in (out if isinstance(out, (list, tuple)) else [out])]
    if functional is None or not all(isinstance(tensor, DTensor) for tensor in tensors):
        return USE_TORCH
    if "dtype" in inputs and inputs["dtype"] is None:  # reductions accumulate in the dtype of out
        inputs["dtype"] = tensors[0].dtype
    results = apply(functional, list(inputs.values()))
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    for tensor, result in zip(tensors, results, strict=True):
        _check(call.op, tensor, result)
    for tensor, result in zip(tensors, results, strict=True):
        overwrite(tensor, local_part(result, reduced_placements(tensor), tensor.device_mesh))
    return tuple(outs) if len(call.op._schema.returns) > 1 else outs[0] if call.op._schema.returns else None


@functools.cache
def _functional(op: Any) -> Any:
    """Return the overload with the same arguments but the outputs; None if there is none."""
    packet = op.overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in op._schema.arguments if not argument.is_out]
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if not schema.is_mutable and [(argument.name, str(argument.type)) for argument in schema.arguments] == wanted:
            return getattr(packet, overload)
    return None


def _check(op: Any, out: DTensor, result: torch.Tensor) -> None:
    if out.shape != result.shape:
        raise UnsupportedCall(
            f"{op} would change the shape of the DTensor given as out, from {tuple(out.shape)} to "
            f"{tuple(result.shape)}: give it one of that shape, or call it without out"
        )
    if not torch.can_cast(result.dtype, out.dtype):
        raise RuntimeError(f"{op}: result type {result.dtype} can't be cast to the desired output type {out.dtype}")
