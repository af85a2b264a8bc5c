"""Calls within a trace of torch.compile, export or a fake mode.

A decision is the one that eager code gets, so that the dispatcher may cache it. A rule runs within the trace where
every rank traces the same program: no rank has more than another, and nothing is written or drawn. Elsewhere the call
leaves the graph, on every rank alike: torch.compile breaks the graph there and runs the call eagerly, with the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, is_shard


def answer_in_trace(call: Call, family: str | None, answer: Callable[[], Any]) -> Any:
    """Return what `answer` returns if it belongs into a graph; raise what breaks the graph if not."""
    fits = _fits_a_graph(call, family)
    try:
        found = answer()
    except Exception as error:
        if fits or private.leaves_graph(error):
            raise
        raise private.out_of_graph(call.op) from error
    if private.is_decision(found) or fits:
        return found
    raise private.out_of_graph(call.op)


def _fits_a_graph(call: Call, family: str | None) -> bool:
    """Whether every rank traces the same for this call, and all of its effect is in its results."""
    tensors = [tensor for _, tensor in call.spots() if isinstance(tensor, DTensor)]
    effects = family == "random" or call.op._schema.is_mutable or private.is_view(call.op)
    return not effects and all(type(tensor) is DTensor and _is_even(tensor) for tensor in tensors)


def _is_even(tensor: DTensor) -> bool:
    """Whether every rank's shard has the same size, known now; a symbolic size is not."""
    sizes = list(tensor.shape)
    for axis, place in enumerate(tensor.placements):
        if not is_shard(place):
            if place.is_replicate() or place.is_partial():
                continue
            return False
        ranks = tensor.device_mesh.size(axis)
        if type(sizes[place.dim]) is not int or not sizes[place.dim] or sizes[place.dim] % ranks:
            return False
        sizes[place.dim] //= ranks
    return all(type(size) is int for size in sizes)
