"""torch's loss_parallel, with label smoothing, means on several axes, and classes that do not divide.

Within loss_parallel() torch gives log_softmax a gradient that is right only after its own nll_loss, so that label
smoothing, which also reads the log probabilities, raises or is wrong. Here each gradient is its own; what nll_loss
knows of the sums of its rows rides along, and spares log_softmax a reduction as torch's way does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import Call, bind, is_shard, moved, replicated, whole
from holdfast.spmd.rules.loss import nll
from holdfast.spmd.rules.loss.elementwise import MEAN
from holdfast.spmd.rules.softmax import softmax

ROW_SUMS = "_holdfast_row_sums"  # on a gradient: the sums of its rows over all classes, and the version that had them


def loss_handlers(torch_way: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """For each operator that loss_parallel handles: ours, with torch's own for what is no class shard."""
    ours = {
        "_log_softmax.default": _log_softmax,
        "_log_softmax_backward_data.default": _log_softmax_backward,
        "nll_loss_forward.default": _loss,
        "nll_loss2d_forward.default": _loss,
        "nll_loss_backward.default": _loss_backward,
        "nll_loss2d_backward.default": _loss_backward,
    }
    named = {op: ours.get(str(op).removeprefix("aten.")) for op in torch_way}
    return {op: _handler(run, torch_way[op]) for op, run in named.items() if run is not None}


def _handler(run: Callable[[Call, list[int]], Any], torch_way: Callable[..., Any]) -> Callable[..., Any]:
    def handle(op: Any, args: Any, kwargs: Any) -> Any:
        mesh = bind(op, args, kwargs).mesh
        args = tuple(
            replicated(value, mesh) if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) else value
            for value in args
        )
        call = bind(op, args, kwargs, private.unwrap(op, args, kwargs))
        axes = _class_axes(call)
        return run(call, axes) if axes else torch_way(op, args, kwargs)

    return handle


def _class_axes(call: Call) -> list[int]:
    """The mesh axes that shard the classes."""
    scores = call["output" if "output" in call.names else "self"]
    dim = call["dim"] % scores.ndim if "dim" in call.names else min(1, scores.ndim - 1)
    return [axis for axis, place in enumerate(scores.placements) if is_shard(place) and place.dim == dim]


def _log_softmax(call: Call, axes: list[int]) -> Any:
    result = softmax.normalised(call, axes)
    return result.to(torch.float32) if call["half_to_float"] else result


def _log_softmax_backward(call: Call, axes: list[int]) -> Any:
    gradient = call["grad_output"]
    known, version = getattr(gradient, ROW_SUMS, (None, -1))
    places = softmax.kept(call["output"])
    inner = softmax.gradient_of(call, axes, places, known if version == gradient._version else None)
    return inner.to(call["input_dtype"])


def _loss(call: Call, axes: list[int]) -> Any:
    """The loss is reduced over the classes at once, as loss_parallel promises; over batch shards it stays Partial."""
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
    """Each row of the gradient has one entry, whose rank need not be asked: every rank has the targets."""
    dim = min(1, inner.ndim - 1)
    rows = [Replicate() if not is_shard(place) or place.dim == dim else place for place in inner.placements]
    target = moved(call["target"], _without(rows, dim), call.mesh)
    valid = target != call["ignore_index"]
    out = call["grad_output"]
    value = whole(out) if not out.ndim else moved(out, _without(rows, dim), call.mesh)
    if call["reduction"] == MEAN:
        value = value / whole(call["total_weight"])
    if call["weight"] is not None:
        value = value * whole(call["weight"])[torch.where(valid, target, 0)]
    return torch.where(valid, -value, 0.0).unsqueeze(dim)


def _without(places: list[Any], dim: int) -> list[Any]:
    """Placements of a tensor that lacks `dim`."""
    return [type(place)(place.dim - 1) if is_shard(place) and place.dim > dim else place for place in places]
