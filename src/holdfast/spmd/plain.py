"""Plain tensors among DTensors, where they can only be indices, masks, or made by torch: the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, bind, replicated
from holdfast.spmd.empties import carry_out
from holdfast.spmd.turnedscan import turn_shards

INDEXING = (
    *("index.Tensor", "index_put.default", "index_put_.default", "_index_put_impl_.default", "masked_select.default"),
    *("masked_fill_.Scalar",),
    *("masked_scatter.default", "masked_scatter_.default", "scatter_add.default", "scatter_add_.default"),
    *("scatter.src", "scatter.value", "index_add.default", "index_copy.default", "index_select.default"),
    *(
        "gather.default",
        "index_add_.default",
        "index_copy_.default",
        "index_fill_.int_Scalar",
        "index_fill_.int_Tensor",
    ),
    *("scatter_.src", "scatter_.value", "scatter_reduce.two", "scatter_reduce_.two"),
    *("index_fill.int_Scalar", "index_fill.int_Tensor", "take.default", "put.default", "searchsorted.Tensor"),
    *("repeat_interleave.Tensor", "select_scatter.default", "slice_scatter.default", "diagonal_scatter.default"),
    *(
        "embedding_bag.padding_idx",
        "_embedding_bag.default",
        "_embedding_bag_forward_only.default",
        "_embedding_bag_backward.default",
        "_embedding_bag_per_sample_weights_backward.default",
    ),
    *("index_reduce.default", "index_reduce_.default"),
)
BRACKETS = ("aten.index.", "index_put")  # whose indices may lie on the CPU beside tensors that do not
MASKING = ("masked_fill.Scalar", "masked_fill.Tensor")
SAMPLING = ("fractional_max_pool2d.default", "fractional_max_pool3d.default")


def take_plain(op: Any, args: Any, kwargs: Any) -> Any:
    """A handler that takes every plain tensor for a replicated one, and then goes the common way."""
    return go_on(op, *_replicated(op, bind(op, args, kwargs).mesh, args, kwargs))


def take_masks(op: Any, args: Any, kwargs: Any) -> Any:
    """masked_fill with a plain mask; where the mask lies as the tensor does, the shortest way."""
    tensor, mask, value = args
    if _lie_alike(mask, tensor) and not isinstance(value, torch.Tensor):
        filled = op(private.local_of(tensor), private.local_of(mask), value)
        return private.wrap(filled, private.spec_of(tensor))
    _refuse_plain(op, args, masks=True)
    return take_plain(op, args, kwargs)


def take_samples(op: Any, args: Any, kwargs: Any) -> Any:
    """Fractional pooling, for which torch draws plain random numbers: the same on every rank, whose seeds are."""
    _refuse_plain(op, args[:1])
    return take_plain(op, args, kwargs)


def _lie_alike(one: Any, other: Any) -> bool:
    """Whether two DTensors have the same shape and the same shards or replicas, whatever their dtypes; no Partial."""
    if type(one) is not DTensor or type(other) is not DTensor:
        return False
    here, there = private.spec_of(one), private.spec_of(other)
    return (
        here.mesh is there.mesh
        and here.placements == there.placements
        and one.shape == other.shape
        and one.stride() == other.stride()
        and not any(place.is_partial() for place in here.placements)
    )


def take_made(op: Any, args: Any, kwargs: Any) -> Any:
    """The same for what torch's gradient formulas make, which is the same on every rank; never for a user's tensors."""
    if private.in_gradient():
        return take_plain(op, args, kwargs)
    _refuse_plain(op, args)
    return go_on(op, args, kwargs)


def demand(*names: str) -> None:
    """From now on let these operators take what gradient formulas make; the dispatcher's own way is faster before."""
    for name in names:
        if (op := private.operator(name)) is not None:
            private.handlers().setdefault(op, take_made)


def demand_flips() -> None:
    """From now on let the gradients of scans flip shards where they lie."""
    private.handlers().setdefault(torch.ops.aten.flip.default, take_flip)


def take_flip(op: Any, args: Any, kwargs: Any) -> Any:
    turned = turn_shards(*args)
    return go_on(op, args, kwargs) if turned is LEAVE else turned


def _refuse_plain(op: Any, args: Any, masks: bool = False) -> None:
    """Raise as torch does: a plain tensor may differ from rank to rank; only masks are taken to be the same."""
    for item in tree_leaves(args):
        if not isinstance(item, torch.Tensor) or isinstance(item, DTensor) or item.numel() == 1:
            continue
        if not masks or item.dtype != torch.bool:
            raise RuntimeError(
                f"{op} got mixed torch.Tensor and DTensor: a plain tensor of {item.dtype} and shape "
                f"{tuple(item.shape)} may differ from rank to rank; make it a DTensor first (distribute_tensor)"
            )


def _replicated(op: Any, mesh: DeviceMesh, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def placed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(placed(item) for item in value)
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return replicated(_at_home(op, value, mesh), mesh)
        return value

    return placed(tuple(args)), {name: placed(value) for name, value in kwargs.items()}


def _at_home(op: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A plain tensor on the mesh's devices; from elsewhere only indices in brackets come, as on one device.

    Said on every rank: the kernel of one whose part is empty would not refuse it, and that rank would wait.
    """
    if value.device.type == mesh.device_type or not value.ndim:
        return value
    if any(name in str(op) for name in BRACKETS):
        return value.to(mesh.device_type)
    raise RuntimeError(
        f"{op}: a plain tensor of shape {tuple(value.shape)} lies on {value.device}, the DTensors beside it on "
        f"{mesh.device_type}: move it there first"
    )


def go_on(op: Any, args: Any, kwargs: Any) -> Any:
    """The common way of a call, after a handler."""
    info = private.unwrap(op, args, kwargs)
    sharding = private.slow_path()(op, args, kwargs, info, True)
    if not private.is_decision(sharding):
        return sharding
    return carry_out(op, args, kwargs, info, sharding)
