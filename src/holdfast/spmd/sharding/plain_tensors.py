"""Handlers that take plain tensors as replicas: indices, masks, random samples, tensors of gradient formulas."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from holdfast.spmd.base import torch_dispatch, torch_specs
from holdfast.spmd.base.call import USE_TORCH, Call, Run, bind
from holdfast.spmd.base.torch_autograd import in_gradient
from holdfast.spmd.base.torch_decisions import is_decision
from holdfast.spmd.base.torch_dispatch import operator
from holdfast.spmd.base.torch_specs import local_of, spec_of
from holdfast.spmd.sharding.empty_shards import execute_decision
from holdfast.spmd.sharding.local_parts import replicated

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
PLAIN_IN_GRADIENT = "torch's gradient formula makes a plain tensor, which its dispatcher then refuses next to a DTensor"
BRACKETS = ("aten.index.", "index_put")  # their indices may be on the CPU while the tensors are not
MASKING = ("masked_fill.Scalar", "masked_fill.Tensor")
SAMPLING = ("fractional_max_pool2d.default", "fractional_max_pool3d.default")
UNSCALING = ("_amp_foreach_non_finite_check_and_unscale_.default",)


def accept_plain(op: Any, args: Any, kwargs: Any) -> Any:
    """Handle a call by treating every plain tensor as replicated, then dispatch it again."""
    return dispatch_again(op, *_replicated(op, bind(op, args, kwargs).mesh, args, kwargs))


def accept_masks(op: Any, args: Any, kwargs: Any) -> Any:
    """Handle masked_fill with a plain mask; with equal placements of mask and tensor, run it directly."""
    tensor, mask, value = args
    if _are_placed_alike(mask, tensor) and not isinstance(value, torch.Tensor):
        filled = op(local_of(tensor), local_of(mask), value)
        return torch_specs.wrap(filled, spec_of(tensor))
    _refuse_plain(op, args, masks=True)
    return accept_plain(op, args, kwargs)


def accept_samples(op: Any, args: Any, kwargs: Any) -> Any:
    """Handle fractional pooling, for which torch draws plain random numbers: equal on ranks with equal seeds."""
    _refuse_plain(op, args[:1])
    return accept_plain(op, args, kwargs)


def accept_gradients(op: Any, args: Any, kwargs: Any) -> Any:
    """Handle the unscale of plain gradients beside DTensors: the plain ones are equal on every rank."""
    gradients, found, scale = args
    plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    placed = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    if plain:
        op(plain, found, scale)
    return dispatch_again(op, (placed, found, scale), kwargs)


def with_replicas(call: Call) -> Call:
    """Return the call with replicas in place of the plain tensors that torch let pass: rules read placements.

    Those without dims stay, as rules take them for numbers, and so does what the call writes.
    """
    if not any(tensor.ndim and not isinstance(tensor, DTensor) for _, tensor in call.tensor_args()):
        return call
    written = torch_dispatch.written_positions(call.op)

    def placed(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim and not isinstance(value, DTensor):
            return replicated(value.detach(), call.mesh)
        return [placed(item) for item in value] if isinstance(value, (list, tuple)) else value

    values = (value if at in written else placed(value) for at, value in enumerate(call.values))
    return Call(call.op, tuple(values), call.mesh, call.info)


def _are_placed_alike(one: Any, other: Any) -> bool:
    """Return True for DTensors of the same shape, strides and placements, without Partials; dtypes may differ."""
    if type(one) is not DTensor or type(other) is not DTensor:
        return False
    here, there = spec_of(one), spec_of(other)
    return (
        here.mesh is there.mesh
        and here.placements == there.placements
        and one.shape == other.shape
        and one.stride() == other.stride()
        and not any(place.is_partial() for place in here.placements)
    )


def accept_in_gradient(op: Any, args: Any, kwargs: Any) -> Any:
    """Handle plain tensors that a gradient formula makes, which are equal on every rank; refuse a user's."""
    if in_gradient():
        return accept_plain(op, args, kwargs)
    _refuse_plain(op, args)
    return dispatch_again(op, args, kwargs)


def accept_from_gradients(*names: str) -> None:
    """From now on let these operators accept tensors of gradient formulas; before, the default path is faster."""
    for name in names:
        if (op := operator(name)) is not None:
            torch_dispatch.handlers().setdefault(op, accept_in_gradient)


def with_plain_gradients(*names: str, run: Run = lambda _: USE_TORCH) -> Run:
    """Return a rule that runs `run` and lets the gradient formula's operators, `names`, accept plain tensors."""

    def rule(call: Call) -> Any:
        accept_from_gradients(*names)
        return run(call)

    rule.plain_gradients = names  # type: ignore[attr-defined]
    return rule


def plain_gradients_of(run: Run) -> tuple[str, ...]:
    """Return the operators that a rule lets accept plain tensors of gradient formulas."""
    return getattr(run, "plain_gradients", ())


def _refuse_plain(op: Any, args: Any, masks: bool = False) -> None:
    """Raise as torch does: a plain tensor may differ from rank to rank; only masks are taken to be equal."""
    if torch_dispatch.takes_plain_tensors():
        return
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
            return replicated(_on_mesh_device(op, value, mesh), mesh)
        return value

    return placed(tuple(args)), {name: placed(value) for name, value in kwargs.items()}


def _on_mesh_device(op: Any, value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a plain tensor on the mesh's device; only indices in brackets are moved there, as on one device.

    Every rank raises: the kernel of a rank with an empty shard would not, and that rank would wait.
    """
    if value.device.type == mesh.device_type or not value.ndim:
        return value
    if any(name in str(op) for name in BRACKETS):
        return value.to(mesh.device_type)
    raise RuntimeError(
        f"{op}: a plain tensor of shape {tuple(value.shape)} is on {value.device}, the DTensors are on "
        f"{mesh.device_type}: move it there first"
    )


def dispatch_again(op: Any, args: Any, kwargs: Any) -> Any:
    """Dispatch the call through the slow path, and execute its decision."""
    info = torch_dispatch.unwrap(op, args, kwargs)
    sharding = torch_dispatch.slow_path()(op, args, kwargs, info, True)
    if not is_decision(sharding):
        return sharding
    return execute_decision(op, args, kwargs, info, sharding)
