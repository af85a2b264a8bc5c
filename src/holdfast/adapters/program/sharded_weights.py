"""Runs of a program with DTensors as weights: every other tensor is a DTensor too, the same on every rank.

Not `implicit_replication`: autograd keeps the plain tensor, such as a mask, and refuses it in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from holdfast.core.errors import Unsupported


def mesh_of(weights: Iterable[Any]) -> DeviceMesh | None:
    """Return the mesh of the first weight that is a DTensor."""
    return next((weight.device_mesh for weight in weights if isinstance(weight, DTensor)), None)


def replicated(value: Any, mesh: DeviceMesh) -> Any:
    """Return a plain tensor as a DTensor on its memory, replicated; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


def replicating(function: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """Return an operator whose result is a DTensor even without a tensor as argument, such as arange."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return replicated(function(*args, **kwargs), mesh)

    return call


def refuse_sharded_parts(module: nn.Module, where: str) -> None:
    """Raise Unsupported if FSDP2 shards a part of a program by itself: every rank has inputs of its own then."""
    from torch.distributed.fsdp import FSDPModule

    part = next((path for path, each in module.named_modules() if path and isinstance(each, FSDPModule)), None)
    if part is not None:
        raise Unsupported(
            f"{where}: fully_shard() was called on {part!r}, a part of the program. The parts of a program have no "
            "forward at which FSDP2 would gather their weights: call fully_shard() on the whole program only, or "
            "shard the weights as DTensors"
        )
