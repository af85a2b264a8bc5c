"""torch's sharding decisions (OutputSharding): ask for one, also with empty shards; what a decision moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.patched_function import PatchedFunction
from holdfast.spmd.base.torch_dispatch import dispatcher
from holdfast.spmd.base.torch_specs import specs_in

ATEN = torch.ops.aten
SHARDABLE = "is_tensor_shardable"
# Operators whose sum over an empty shard is zero.
SUMS = (ATEN.sum.default, ATEN.sum.dim_IntList, ATEN.mm.default, ATEN.native_layer_norm_backward.default)


class _EmptyShards(threading.local):
    """Allows torch's strategies in this thread to give a rank an empty shard; by default they never do."""

    allowed = False


EMPTY_SHARDS = _EmptyShards()


def allow_empty_shards() -> list[PatchedFunction]:
    """Let `local_decision` ask torch's strategies for shardings that they otherwise exclude."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args, **kwargs: EMPTY_SHARDS.allowed or original(*args, **kwargs)

    return [PatchedFunction(module, SHARDABLE, make) for module in (torch_versions.utils, torch_versions._matrix_ops)]


def is_decision(value: Any) -> bool:
    """Return True if the slow path returned a sharding and not a result."""
    return isinstance(value, torch_versions.OutputSharding)


def decision(info: Any) -> Any:
    """Return torch's decision for a call, or None if torch has none."""
    try:
        return dispatcher().sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    except Exception:  # noqa: BLE001 - whatever stops torch here, there is no such decision
        return None


def decision_for_plain_shards(info: Any) -> Any:
    """Return what torch would decide if every strided shard were a plain one, or None."""

    def plain(value: Any) -> Any:
        if not _is_spec(value):
            return value
        places = [Shard(p.dim) if isinstance(p, _StridedShard) else p for p in value.placements]
        return torch_versions.DTensorSpec(value.mesh, tuple(places), tensor_meta=value.tensor_meta)

    schema = info.schema
    args, kwargs = tree_map(plain, (schema.args_schema, schema.kwargs_schema), is_leaf=_is_spec)
    asked = SimpleNamespace(schema=type(schema)(schema.op, args, kwargs, schema.schema_info))
    return decision(asked)


def _is_spec(value: Any) -> bool:
    return isinstance(value, torch_versions.DTensorSpec)


def local_decision(info: Any) -> Any:
    """Return a decision that may leave empty shards and needs no communication, or None."""
    if not torch_versions.AT_LEAST_2_13:  # its strategies are handwritten, and some require shards that are not empty
        return None
    EMPTY_SHARDS.allowed = True
    try:
        sharding = decision(info)
    finally:
        EMPTY_SHARDS.allowed = False
    outputs = [] if sharding is None else specs_in(sharding.output_spec)
    if not outputs or needs_communication(sharding, info):
        return None
    partials = [place for spec in outputs for place in spec.placements if place.is_partial()]
    return sharding if all(info.schema.op in SUMS and place.reduce_op == "sum" for place in partials) else None


def needs_communication(sharding: Any, info: Any) -> bool:
    """Return True if a decision redistributes anything by more than slicing replicas."""
    wanted = sharding.redistribute_schema
    if not sharding.needs_redistribute or wanted is None:
        return False
    before, after = specs_in(info.schema.args_schema), specs_in(wanted.args_schema)
    return any(
        present != then and not present.is_replicate()
        for here, there in zip(before, after, strict=True)
        for present, then in zip(here.placements, there.placements, strict=True)
    )


def moves_first(sharding: Any, info: Any) -> bool:
    """Return True if a decision changes the placements of the first argument, a tensor or a list of tensors."""
    wanted = sharding.redistribute_schema
    if not sharding.needs_redistribute or wanted is None:
        return False
    present, after = specs_in(info.schema.args_schema[:1]), specs_in(wanted.args_schema[:1])
    return [spec.placements for spec in present] != [spec.placements for spec in after]


def decided_specs(sharding: Any) -> list[Any]:
    """Return the specs of the inputs after a decision's redistribution; empty if nothing moves."""
    if not sharding.needs_redistribute or sharding.redistribute_schema is None:
        return []
    return specs_in(sharding.redistribute_schema.args_schema)


def decided_reshape(info: Any) -> tuple[Any, Any] | None:
    """Return the specs before and after a reshape as torch decides it, or None if torch has no decision."""
    if (sharding := decision(info)) is None:
        return None
    inputs = decided_specs(sharding)
    return (inputs[0] if inputs else info.schema.args_schema[0]), sharding.output_spec
