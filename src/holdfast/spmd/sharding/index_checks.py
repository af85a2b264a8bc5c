"""Indices out of range: the error of one device on every rank, and not on those alone that hold the bad one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import Call, moved
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.mesh_collectives import reduced
from holdfast.spmd.sharding.partials import reduced_places

MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class Asked:
    """Indices, the first and the last that there may be, and one that stands for nothing."""

    index: Any
    first: int
    last: int
    ignored: int | None = None


def answer_for_all(call: Call, together: bool) -> Any:
    """The answer of one device, an error, on every rank where an index is out of range; None where none is.

    Torch may give each rank a part of indices that all have, so that one rank would raise alone: here every rank
    looks at all of them. What is itself sharded is looked at `together`, which costs a reduction, or not at all.
    On a GPU the kernels look for themselves: to read an index here would make the CPU wait.
    """
    asked = [(ask, _axes(ask.index)) for ask in asked_of(call)]
    axes = {axis for _, cut in asked for axis in cut} if together else set()
    wanted = [ask for ask, cut in asked if together or (not cut and ask.index.device.type == "cpu")]
    if not wanted or (not axes and wanted[0].index.device.type != "cpu"):
        return None
    excess = torch.stack([number for ask in wanted for number in _excess(ask)])
    if not bool((reduced(excess, call.mesh, sorted(axes), "max") > 0).any()):
        return None
    if excess.device.type != "cpu":  # the device would take the process with it
        raise IndexError(f"{call.op}: an index is out of range on some rank")
    return gather_and_run(call)


def asked_of(call: Call) -> list[Asked]:
    """The indices of a call; masks are none."""
    return LOOKUPS[str(call.op).removeprefix("aten.")](call)


def _axes(index: Any) -> list[int]:
    """The mesh axes along which ranks have different parts of the indices."""
    places = index.placements if isinstance(index, DTensor) else ()
    return [axis for axis, place in enumerate(places) if not place.is_replicate()]


def _excess(ask: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    """By how much this rank's indices exceed the last, and fall short of the first."""
    own = ask.index
    if isinstance(own, DTensor):
        own = moved(own, reduced_places(own), own.device_mesh)
    if ask.ignored is not None:
        own = own[own != ask.ignored]
    if not own.numel():
        nothing = torch.zeros((), dtype=torch.int64, device=own.device)
        return nothing, nothing
    low, high = (number.to(torch.int64) for number in own.aminmax())
    return high - ask.last, ask.first - low


def _keys(call: Call) -> list[Asked]:
    """x[i, :, mask]: a mask takes as many dims as it has."""
    asked, dim = [], 0
    for index in call["indices"]:
        if index is None or index.dtype not in MASKS:
            if index is not None:
                size = call.values[0].shape[dim]
                asked.append(Asked(index, -size, size - 1))
            dim += 1
        else:
            dim += index.ndim
    return asked


def _along(call: Call) -> list[Asked]:
    tensor, dim = call.values[0], call["dim"]
    size = tensor.shape[dim] if tensor.ndim else 1
    return [Asked(call["index"], 0, size - 1)]


def _fill(call: Call) -> list[Asked]:
    size = _along(call)[0].last + 1
    return [Asked(call["index"], -size, size - 1)]


def _flat(call: Call) -> list[Asked]:
    size = call.values[0].numel()
    return [Asked(call["index"], -size, size - 1)]


def _rows(call: Call) -> list[Asked]:
    return [Asked(call["indices"], 0, call.values[0].shape[0] - 1)]


def _classes(call: Call) -> list[Asked]:
    scores = call["self"]
    ignored = call["ignore_index"] if "ignore_index" in call.names else None
    classes = scores.shape[min(1, scores.ndim - 1)] if scores.ndim else 1
    return [Asked(call["target"], 0, classes - 1, ignored)]


LOOKUPS: dict[str, Callable[[Call], list[Asked]]] = {
    **dict.fromkeys(("index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default"), _keys),
    **dict.fromkeys(("index_select.default", "gather.default", "index_copy.default", "index_add.default"), _along),
    **dict.fromkeys(
        ("index_copy_.default", "index_add_.default", "index_reduce.default", "index_reduce_.default"), _along
    ),
    **dict.fromkeys(("scatter.src", "scatter.value", "scatter_.src", "scatter_.value", "scatter_add.default"), _along),
    **dict.fromkeys(("scatter_add_.default", "scatter_reduce.two", "scatter_reduce_.two"), _along),
    **dict.fromkeys(("index_fill.int_Scalar", "index_fill.int_Tensor"), _fill),
    **dict.fromkeys(("index_fill_.int_Scalar", "index_fill_.int_Tensor"), _fill),
    **dict.fromkeys(("take.default", "put.default", "put_.default"), _flat),
    **dict.fromkeys(("embedding.default", "embedding_bag.default", "_embedding_bag.default"), _rows),
    **dict.fromkeys(("_embedding_bag_forward_only.default", "embedding_renorm_.default"), _rows),
    **dict.fromkeys(("nll_loss_forward.default", "nll_loss2d_forward.default", "multi_margin_loss.default"), _classes),
}
