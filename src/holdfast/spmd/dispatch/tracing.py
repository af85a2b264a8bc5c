"""Rules within a trace of torch.compile, export or a fake mode: which calls belong in the graph, which break it.

A decision is the same as in eager code, so the dispatcher may cache it. A rule runs within the trace if every rank
traces the same program: shards are even, and nothing is written or drawn at random. Any other call leaves the graph, on
every rank alike: torch.compile breaks the graph and runs the call eagerly, with the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call
from holdfast.spmd.base.torch_decisions import is_decision
from holdfast.spmd.base.torch_dispatch import is_view
from holdfast.spmd.base.torch_modes import is_data_dependent, leaves_graph, out_of_graph, traces_for_all_ranks
from holdfast.spmd.sharding.shard_sizes import is_shard

# Views that every rank takes of its own part.
LOCAL_VIEWS = (torch.ops.aten._conj.default, torch.ops.aten.view_as_real.default)


def run_in_trace(call: Call, family: str | None, answer: Callable[[], Any]) -> Any:
    """Return the result of `answer` if it belongs in a graph; raise the error that breaks the graph if not."""
    reason = _reason_to_leave(call, family)
    try:
        result = answer()
    except Exception as error:
        if is_data_dependent(error):
            reason = "the rule depends on values, which a trace has not"
        elif reason is None or leaves_graph(error):
            raise
        raise out_of_graph(call.op, reason) from error
    if is_decision(result) or reason is None:
        return result
    raise out_of_graph(call.op, reason)


def _reason_to_leave(call: Call, family: str | None) -> str | None:
    """Return why ranks would trace this call differently, or its side effect; None if it belongs in a graph."""
    if traces_for_all_ranks():
        return "a rule may trace values of its own rank, and compile_on_one_rank runs the graph on every rank"
    if family == "random":
        return "each shard draws random numbers of its own"
    if call.op._schema.is_mutable:
        return "the call writes into its input"
    if is_view(call.op) and call.op not in LOCAL_VIEWS:
        return "the view may have to be fetched from other ranks"
    for _, tensor in call.tensor_args():
        if isinstance(tensor, DTensor) and type(tensor) is not DTensor:
            return "a view of a sharded dim may have to be fetched from other ranks"
        if isinstance(tensor, DTensor) and _has_symbolic_size(tensor, family):
            return f"a tensor of shape {list(tensor.shape)} has symbolic sizes"
        if isinstance(tensor, DTensor) and call.op not in LOCAL_VIEWS and not _is_even(tensor):
            return f"a tensor of shape {list(tensor.shape)} as {tensor.placements} has uneven or strided shards"
    return None


def _has_symbolic_size(tensor: DTensor, family: str | None) -> bool:
    """Return True if a rule might decide by a size that is not known; lookups decide by those of the table only."""
    if family == "embedding" and all(place.is_replicate() for place in tensor.placements):
        return False
    return any(type(size) is not int for size in tensor.shape)


def _is_even(tensor: DTensor) -> bool:
    """Return True if every rank's shard has the same size."""
    sizes = list(tensor.shape)
    for axis, place in enumerate(tensor.placements):
        if not is_shard(place):
            if place.is_replicate() or place.is_partial():
                continue
            return False
        ranks = tensor.device_mesh.size(axis)
        if not sizes[place.dim] or sizes[place.dim] % ranks:
            return False
        sizes[place.dim] //= ranks
    return True
