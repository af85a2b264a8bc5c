"""Indices out of range: every rank raises the error of one device; the valid range of each indexing operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.torch_modes import assert_async, can_be_read
from holdfast.spmd.sharding.empty_shards import has_empty_input
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.local_parts import full_tensor, local_part, replicated
from holdfast.spmd.sharding.mesh_collectives import all_reduce
from holdfast.spmd.sharding.partials import reduced_placements

MASKS = (torch.bool, torch.uint8)


@dataclass(frozen=True, slots=True)
class IndexBounds:
    """An index tensor, the first and last valid index, and the index to ignore."""

    index: Any
    first: int
    last: int
    ignored: int | None = None


def check_on_all_ranks(call: Call, together: bool) -> Any:
    """Return one device's answer, an error, on every rank if an index is out of range; None if all are valid.

    torch may give each rank a part of replicated indices, so that only one rank would raise: here every rank checks all
    of them. Sharded indices are checked only with `together`, which costs a reduction. On a GPU the kernels check:
    reading an index here would make the CPU wait.
    """
    checks = [(bounds, _axes(bounds.index)) for bounds in index_bounds(call)]
    axes = {axis for _, sharded in checks for axis in sharded} if together else set()
    wanted = [bounds for bounds, sharded in checks if together or (not sharded and bounds.index.device.type == "cpu")]
    if not wanted or (not axes and wanted[0].index.device.type != "cpu"):
        return None
    excess = torch.stack([number for bounds in wanted for number in _excess(bounds)])
    if not bool((all_reduce(excess, call.mesh, sorted(axes), "max") > 0).any()):
        return None
    if excess.device.type != "cpu":  # an assertion on the device would end the process
        raise IndexError(f"{call.op}: an index is out of range on some rank")
    return gather_and_run(call)


def index_bounds(call: Call) -> list[IndexBounds]:
    """Return the index tensors of a call with their bounds; masks are not index tensors."""
    return LOOKUPS[str(call.op).removeprefix("aten.")](call)


def _axes(index: Any) -> list[int]:
    """Return the mesh axes along which ranks hold different indices."""
    places = index.placements if isinstance(index, DTensor) else ()
    return [axis for axis, place in enumerate(places) if not place.is_replicate()]


def _excess(bounds: IndexBounds) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by how much this rank's indices exceed the last valid one, and fall below the first."""
    own = bounds.index
    if isinstance(own, DTensor):
        own = local_part(own, reduced_placements(own), own.device_mesh)
    if bounds.ignored is not None:
        own = own[own != bounds.ignored]
    if not own.numel():
        zero = torch.zeros((), dtype=torch.int64, device=own.device)
        return zero, zero
    low, high = (number.to(torch.int64) for number in own.aminmax())
    return high - bounds.last, bounds.first - low


def _keys(call: Call) -> list[IndexBounds]:
    """Return the indices of x[i, :, mask]; a mask covers as many dims as it has."""
    bounds, dim = [], 0
    for index in call["indices"]:
        if index is None or index.dtype not in MASKS:
            if index is not None:
                size = call.values[0].shape[dim]
                bounds.append(IndexBounds(index, -size, size - 1))
            dim += 1
        else:
            dim += index.ndim
    return bounds


def _along(call: Call) -> list[IndexBounds]:
    tensor, dim = call.values[0], call["dim"]
    size = tensor.shape[dim] if tensor.ndim else 1
    return [IndexBounds(call["index"], 0, size - 1)]


def _fill(call: Call) -> list[IndexBounds]:
    size = _along(call)[0].last + 1
    return [IndexBounds(call["index"], -size, size - 1)]


def _flat(call: Call) -> list[IndexBounds]:
    size = call.values[0].numel()
    return [IndexBounds(call["index"], -size, size - 1)]


def _rows(call: Call) -> list[IndexBounds]:
    return [IndexBounds(call["indices"], 0, call.values[0].shape[0] - 1)]


def _classes(call: Call) -> list[IndexBounds]:
    scores = call["self"]
    ignored = call["ignore_index"] if "ignore_index" in call.names else None
    classes = scores.shape[min(1, scores.ndim - 1)] if scores.ndim else 1
    return [IndexBounds(call["target"], 0, classes - 1, ignored)]


LOOKUPS: dict[str, Callable[[Call], list[IndexBounds]]] = {
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


def with_replicated_indices(call: Call) -> Any:
    """If some rank has an empty shard, call again with replicated indices, so that every rank checks them.

    Otherwise a rank with an empty shard would not raise, and would wait for the others. With masks the call is
    gathered.
    """
    if not has_empty_input(call):
        return USE_TORCH
    indices = [index for slot, index in call.tensor_args() if slot[0]]
    if len(index_bounds(call)) < len(indices):
        return gather_and_run(call)
    if all(is_replicated(index) for index in indices):
        return USE_TORCH
    first, *rest = call.values
    return apply(call.op, [first, *(_replicated(value, call.mesh) for value in rest)])


def _replicated(value: Any, mesh: DeviceMesh) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replicated(item, mesh) for item in value]
    return replicated(full_tensor(value), mesh) if isinstance(value, DTensor) else value


def is_replicated(index: Any) -> bool:
    """Return True if every rank has the full tensor."""
    return not isinstance(index, DTensor) or all(place.is_replicate() for place in index.placements)


def is_in_range(index: torch.Tensor, first: int, last: int) -> bool:
    """Return True if all of this rank's indices are in range; on a GPU the device asserts it."""
    right = (index >= first) & (index <= last)
    if can_be_read(right):
        return bool(right.all())
    assert_async(right, "an index is out of range")
    return True
