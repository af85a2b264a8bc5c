"""Handlers for torch's loss_parallel: log_softmax and nll_loss over class shards, label smoothing, uneven classes.

Within loss_parallel() torch gives log_softmax a gradient that is right only after its own nll_loss. Label smoothing
also reads the log probabilities, so it raises or is wrong. Here each operator has its own gradient. The row sums that
nll_loss knows are attached to its gradient, which spares log_softmax a reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.spmd.base import torch_dispatch
from holdfast.spmd.base.call import Call, bind
from holdfast.spmd.rules.loss import nll
from holdfast.spmd.rules.loss.elementwise import MEAN
from holdfast.spmd.rules.softmax import softmax
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, replicated
from holdfast.spmd.sharding.shard_sizes import is_shard

ROW_SUMS = "_holdfast_row_sums"  # of a gradient: its row sums over all classes, and their version


def loss_handlers(original: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a handler for each operator of loss_parallel; without class shards it calls torch's own handler."""
    ours = {
        "_log_softmax.default": _log_softmax,
        "_log_softmax_backward_data.default": _log_softmax_backward,
        "nll_loss_forward.default": _loss,
        "nll_loss2d_forward.default": _loss,
        "nll_loss_backward.default": _loss_backward,
        "nll_loss2d_backward.default": _loss_backward,
    }
    named = {op: ours.get(str(op).removeprefix("aten.")) for op in original}
    return {op: _handler(run, original[op]) for op, run in named.items() if run is not None}


def _handler(run: Callable[[Call, list[int]], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        mesh = bind(op, args, kwargs).mesh
        args = tuple(
            replicated(value, mesh) if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value
            for value in args
        )
        call = bind(op, args, kwargs, torch_dispatch.unwrap(op, args, kwargs))
        axes = _class_axes(call)
        return run(call, axes) if axes else original(op, args, kwargs)

    return handle


def _class_axes(call: Call) -> list[int]:
    """Return the mesh axes that shard the classes."""
    scores = call["output" if "output" in call.names else "self"]
    dim = call["dim"] % scores.ndim if "dim" in call.names else min(1, scores.ndim - 1)
    return [axis for axis, place in enumerate(scores.placements) if is_shard(place) and place.dim == dim]


def _log_softmax(call: Call, axes: list[int]) -> Any:
    result = softmax.normalised(call, axes)
    return result.to(torch.float32) if call["half_to_float"] else result


def _log_softmax_backward(call: Call, axes: list[int]) -> Any:
    gradient = call["grad_output"]
    known, version = getattr(gradient, ROW_SUMS, (None, -1))
    places = softmax.shard_placements(call["output"])
    inner = softmax.gradient_of(call, axes, places, known if version == gradient._version else None)
    return inner.to(call["input_dtype"])


def _loss(call: Call, axes: list[int]) -> Any:
    """Reduce the loss over the classes, as loss_parallel promises; over batch shards it stays Partial."""
    loss, weight = nll.forward(call)
    places = [
        Replicate() if axis in axes or (not isinstance(place, Partial) and not is_shard(place)) else place
        for axis, place in enumerate(loss.placements)
    ]
    return loss.redistribute(loss.device_mesh, places), weight


def _loss_backward(call: Call, axes: list[int]) -> Any:
    inner = nll.backward(call)
    setattr(inner, ROW_SUMS, (_row_sums(call, inner), inner._version))
    return inner


def _row_sums(call: Call, inner: DTensor) -> torch.Tensor:
    """Return the sum of each row of the gradient. A row has one entry, and every rank has the targets."""
    dim = min(1, inner.ndim - 1)
    rows = [Replicate() if not is_shard(place) or place.dim == dim else place for place in inner.placements]
    target = local_part(call["target"], _without(rows, dim), call.mesh)
    valid = target != call["ignore_index"]
    out = call["grad_output"]
    value = full_tensor(out) if not out.ndim else local_part(out, _without(rows, dim), call.mesh)
    if call["reduction"] == MEAN:
        value = value / full_tensor(call["total_weight"])
    if call["weight"] is not None:
        value = value * full_tensor(call["weight"])[torch.where(valid, target, 0)]
    return torch.where(valid, -value, 0.0).unsqueeze(dim)


def _without(places: list[Any], dim: int) -> list[Any]:
    """Return the placements of a tensor that lacks `dim`."""
    return [type(place)(place.dim - 1) if is_shard(place) and place.dim > dim else place for place in places]
