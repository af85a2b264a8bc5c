"""Calls in which some rank has an empty shard: where a kernel refuses, the answer for nothing is known anyway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Placement

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, is_shard
from holdfast.spmd.base.collective_errors import is_of_a_collective
from holdfast.spmd.sharding.mesh_collectives import has_empty_shard

USES = 2  # of a result that is a sum, each of which reduces it
IDENTITY = {"sum": 0.0, "avg": 0.0, "max": float("-inf"), "min": float("inf"), "product": 1.0}


def has_empty(call: Call) -> bool:
    """Whether some rank holds none of an input that is not empty; the same answer on every rank."""
    return any(
        isinstance(tensor, DTensor) and has_empty_shard(tensor.shape, tensor.device_mesh, tensor.placements)
        for _, tensor in call.spots()
    )


def will_have_empty(sharding: Any) -> bool:
    """Whether what torch decided gives some rank an empty part of an input."""
    return any(has_empty_shard(spec.shape, spec.mesh, spec.placements) for spec in private.decided_specs(sharding))


def pays(quiet: Any, talking: Any, info: Any) -> bool:
    """Whether a decision that sends nothing is the better one: the sums that it leaves are less than is sent now.

    Those of a gradient are not used again and again, as those of a forward pass may be.
    """
    later = sum(_received(spec, [private.REPLICATE] * spec.mesh.ndim) for spec in private.specs_in(quiet.output_spec))
    if talking is None or not later or private.in_gradient():
        return True
    moves = zip(private.specs_in(info.schema.args_schema), private.decided_specs(talking), strict=True)
    return USES * later <= sum(_received(here, there.placements, shards=True) for here, there in moves)


def _received(spec: Any, places: Sequence[Placement], shards: bool = False) -> float:
    """Bytes that a rank receives to reduce a spec's Partials, and gather its shards, which are padded to one length."""
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


def run_decision(call: Call, args: Any, kwargs: Any, sharding: Any) -> Any:
    """Carry out what torch decided, but where this rank's kernel fails on nothing, put nothing's result."""
    call.info.output_sharding = sharding
    try:
        local = private.local_results(call.op, args, call.info)
    except Exception as error:
        if not _has_nothing(call) or is_of_a_collective(error):
            raise
        local = None
    if local is None or (_has_nothing(call) and not _fits(local, sharding.output_spec)):
        local = _of_nothing(call, sharding.output_spec)
    return private.wrap_results(local, sharding.output_spec)


def _has_nothing(call: Call) -> bool:
    """Whether this rank's kernel was given an empty part."""
    return any(part.numel() == 0 for part in private.local_inputs(call.info))


def _fits(local: Any, spec: Any) -> bool:
    """Whether a result has the sizes that it must have: addmv of no rows to a number gives a number."""
    if isinstance(spec, (tuple, list)):
        return all(_fits(*pair) for pair in zip(local, spec, strict=False))
    if spec is None or not isinstance(local, torch.Tensor):
        return True
    sizes, _ = private.local_box(spec.shape, spec.mesh, spec.placements)
    return tuple(local.shape) == sizes


def carry_out(op: Any, args: Any, kwargs: Any, info: Any, sharding: Any) -> Any:
    """Do in Python what torch's dispatcher does with its decision."""
    info.output_sharding = sharding
    return private.finish(op, args, kwargs, info, private.local_results(op, args, info))


def _of_nothing(call: Call, spec: Any) -> Any:
    if isinstance(spec, (tuple, list)):
        return tuple(_of_nothing(call, item) for item in spec)
    if spec is None:
        return None
    sizes, _ = private.local_box(spec.shape, spec.mesh, spec.placements)
    value = 0.0
    for placement in spec.placements:
        if isinstance(placement, Partial):
            value = IDENTITY[str(placement.reduce_op)]
    dtype = spec.tensor_meta.dtype
    if not dtype.is_floating_point:
        value = 0 if value == 0 else (torch.iinfo(dtype).min if value < 0 else torch.iinfo(dtype).max)
    return torch.full(sizes, value, dtype=dtype, device=private.local_inputs(call.info)[0].device)
