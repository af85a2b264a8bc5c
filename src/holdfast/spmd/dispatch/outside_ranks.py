"""Calls on a rank that is not in the mesh: results without elements, in the shapes that the mesh's ranks get."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate

from holdfast.spmd.base.call import USE_TORCH, writes_first
from holdfast.spmd.base.torch_dispatch import global_outputs
from holdfast.spmd.base.torch_specs import make_spec, wrap
from holdfast.spmd.base.torch_versions import TensorMeta
from holdfast.spmd.sharding.plain_tensors import accept_from_gradients

# What gradient formulas call with plain zeros. On the mesh's ranks rules ask for it; here no rule runs.
_GRADIENT_FORMULAS = ("cat.default", "stack.default", "where.self", "mul.Scalar")


def run_outside(op: Any, args: tuple[Any, ...], info: Any) -> Any:
    """Return what this rank has of a call's results; USE_TORCH if their shapes are not known here."""
    accept_from_gradients(*_GRADIENT_FORMULAS)
    if op._schema.is_mutable:
        if not op._schema.returns:
            return None
        return args[0] if writes_first(op) else USE_TORCH
    try:
        outputs = global_outputs(info)
    except Exception:  # noqa: BLE001 - a shape that depends on values, or a wrong call: torch raises
        return USE_TORCH
    if isinstance(outputs, TensorMeta):
        return _without_elements(outputs, info)
    if not isinstance(outputs, (list, tuple)):
        return USE_TORCH
    found = [_without_elements(output, info) for output in outputs]
    return found if isinstance(op._schema.returns[0].type, torch.ListType) else tuple(found)


def _without_elements(output: Any, info: Any) -> Any:
    if not isinstance(output, TensorMeta):
        return output
    mesh = info.compute_mesh
    local = torch.zeros(() if not output.shape else (0,), dtype=output.dtype, device=mesh.device_type)
    return wrap(local, make_spec(mesh, [Replicate()] * mesh.ndim, output.shape, output.stride, output.dtype))
