"""Calls on a rank outside of the mesh that torch has no decision about: results of the right shapes, no elements."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from holdfast.spmd.base.call import USE_TORCH, Call, writes_first
from holdfast.spmd.base.torch_dispatch import global_outputs
from holdfast.spmd.base.torch_specs import make_spec, wrap
from holdfast.spmd.base.torch_versions import TensorMeta


def is_outside_of_all(call: Call) -> bool:
    """Return True if this rank is in no mesh of the call's tensors, so that no rank waits for it."""
    tensors = (tensor for _, tensor in call.tensor_args() if isinstance(tensor, DTensor))
    return all(tensor.device_mesh.get_coordinate() is None for tensor in tensors)


def run_outside(call: Call) -> Any:
    """Return results without elements, in the shapes that the mesh's ranks get; USE_TORCH if those are not known."""
    try:
        outputs = global_outputs(call.info)
    except Exception:  # noqa: BLE001 - a shape that depends on values, or a wrong call: torch raises
        return USE_TORCH
    if call.op._schema.is_mutable:
        return _written(call, outputs)
    if isinstance(outputs, TensorMeta):
        return _without_elements(call, outputs)
    if not isinstance(outputs, (list, tuple)):
        return USE_TORCH
    results = [_without_elements(call, output) for output in outputs]
    return results if isinstance(call.op._schema.returns[0].type, torch.ListType) else tuple(results)


def _written(call: Call, outputs: Any) -> Any:
    """Return the result of a call in place that leaves the shape of its first argument as it is."""
    if not call.op._schema.returns:
        return None
    first = call.values[0]
    same = writes_first(call.op) and isinstance(outputs, TensorMeta) and outputs.shape == first.shape
    return first if same else USE_TORCH


def _without_elements(call: Call, output: Any) -> Any:
    """Return a DTensor of a result's shape and dtype; what is not a tensor as it is."""
    if not isinstance(output, TensorMeta):
        return output
    local = torch.zeros((0,) if output.shape else (), dtype=output.dtype, device=call.mesh.device_type)
    places = [Replicate()] * call.mesh.ndim
    return wrap(local, make_spec(call.mesh, places, output.shape, output.stride, output.dtype))
