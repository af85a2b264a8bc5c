"""Calls in which some rank has an empty shard: execute torch's decision; if a kernel fails, use the empty result."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement

from holdfast.spmd.base import torch_dispatch, torch_specs
from holdfast.spmd.base.call import Call
from holdfast.spmd.base.collective_errors import is_collective_error
from holdfast.spmd.base.torch_autograd import in_gradient
from holdfast.spmd.base.torch_decisions import decided_specs
from holdfast.spmd.base.torch_specs import local_box, specs_in
from holdfast.spmd.sharding.shard_sizes import has_empty_shard, is_shard

USES = 2  # expected uses of a Partial result, each of which reduces it
IDENTITY = {"sum": 0.0, "avg": 0.0, "max": float("-inf"), "min": float("inf"), "product": 1.0}


def has_empty_input(call: Call) -> bool:
    """Return True if some rank's shard of a non-empty input is empty; the same answer on every rank."""
    return any(
        isinstance(tensor, DTensor) and has_empty_shard(tensor.shape, tensor.device_mesh, tensor.placements)
        for _, tensor in call.tensor_args()
    )


def will_have_empty_input(sharding: Any) -> bool:
    """Return True if torch's decision gives some rank an empty shard of an input."""
    return any(has_empty_shard(spec.shape, spec.mesh, spec.placements) for spec in decided_specs(sharding))


def local_is_cheaper(local: Any, communicating: Any, info: Any) -> bool:
    """Return True if reducing the Partials of a local decision later costs no more than communicating now.

    The Partials of a gradient are used once; those of a forward pass may be used several times.
    """
    later = sum(_received(spec, [torch_specs.REPLICATE] * spec.mesh.ndim) for spec in specs_in(local.output_spec))
    if communicating is None or not later or in_gradient():
        return True
    moves = zip(specs_in(info.schema.args_schema), decided_specs(communicating), strict=True)
    return USES * later <= sum(_received(here, there.placements, shards=True) for here, there in moves)


def _received(spec: Any, places: Sequence[Placement], shards: bool = False) -> float:
    """Return the bytes that a rank receives to reduce a spec's Partials and to gather its padded shards."""
    sizes, numbers = list(spec.shape), 0.0
    for axis, place in enumerate(spec.placements):
        if is_shard(place):
            sizes[place.dim] = -(-sizes[place.dim] // spec.mesh.size(axis))
    for axis, (now, then) in enumerate(zip(spec.placements, places, strict=True)):
        ranks = spec.mesh.size(axis)
        if now != then and now.is_partial():
            numbers += math.prod(sizes) * 2 * (ranks - 1) / ranks
        elif now != then and shards and not now.is_replicate():
            numbers += math.prod(sizes) * (ranks - 1)
    return float(numbers * spec.tensor_meta.dtype.itemsize)


def run_with_empty_shards(call: Call, args: Any, kwargs: Any, sharding: Any) -> Any:
    """Execute torch's decision; if this rank's kernel fails because a shard is empty, use the empty result."""
    call.info.output_sharding = sharding
    try:
        local = torch_dispatch.local_results(call.op, args, call.info)
    except Exception as error:
        if not _has_empty_local_input(call) or is_collective_error(error):
            raise
        if not _can_be_filled(sharding.output_spec) or _fails_with_rows(call, error):
            raise
        local = None
    if local is None or (_has_empty_local_input(call) and not _fits(local, sharding.output_spec)):
        local = _result_of_empty(call, sharding.output_spec)
    return torch_dispatch.wrap_results(local, sharding.output_spec)


def _has_empty_local_input(call: Call) -> bool:
    """Return True if this rank's kernel was called with an empty tensor."""
    return any(part.numel() == 0 for part in torch_dispatch.local_inputs(call.info))


def _can_be_filled(spec: Any) -> bool:
    """Return True if this rank's results are empty, or Partials without a share."""
    for item in specs_in(spec):
        sizes, _ = local_box(item.shape, item.mesh, item.placements)
        if 0 not in sizes and not any(isinstance(place, Partial) for place in item.placements):
            return False
    return True


def _fails_with_rows(call: Call, error: Exception) -> bool:
    """Return True if the kernel refuses a row of zeros in place of the empty shards, too, as on the other ranks."""
    try:
        torch_dispatch.run_kernel(call.op, call.info, _with_row)
    except Exception as refused:  # noqa: BLE001 - zeros may be wrong in their own way
        return type(refused) is type(error) and _without_numbers(refused) == _without_numbers(error)
    return False


def _with_row(value: Any) -> Any:
    """Return zeros with one row in place of an empty tensor."""
    if not isinstance(value, torch.Tensor) or value.numel():
        return value
    return value.new_zeros([max(1, size) for size in value.shape])


def _without_numbers(error: Exception) -> str:
    return re.sub(r"\d+", "", str(error))


def _fits(local: Any, spec: Any) -> bool:
    """Return True if a result has the expected sizes: addmv of no rows to a scalar gives a scalar."""
    if isinstance(spec, (tuple, list)):
        return all(_fits(*pair) for pair in zip(local, spec, strict=False))
    if spec is None or not isinstance(local, torch.Tensor):
        return True
    sizes, _ = local_box(spec.shape, spec.mesh, spec.placements)
    return tuple(local.shape) == sizes


def execute_decision(op: Any, args: Any, kwargs: Any, info: Any, sharding: Any) -> Any:
    """Execute torch's decision in Python, as its dispatcher would."""
    info.output_sharding = sharding
    return torch_dispatch.finish(op, args, kwargs, info, torch_dispatch.local_results(op, args, info))


def _result_of_empty(call: Call, spec: Any) -> Any:
    if isinstance(spec, (tuple, list)):
        return tuple(_result_of_empty(call, item) for item in spec)
    if spec is None:
        return None
    sizes, _ = local_box(spec.shape, spec.mesh, spec.placements)
    value = 0.0
    for placement in spec.placements:
        if isinstance(placement, Partial):
            value = IDENTITY[str(placement.reduce_op)]
    dtype = spec.tensor_meta.dtype
    if not dtype.is_floating_point:
        value = 0 if value == 0 else (torch.iinfo(dtype).min if value < 0 else torch.iinfo(dtype).max)
    return torch.full(sizes, value, dtype=dtype, device=torch_dispatch.local_inputs(call.info)[0].device)
