"""`p.data = other` for DTensors: torch's setter changes the wrapper only, and the local tensor stays as it was.

FSDP2 keeps a reference to the local tensor of each parameter, padded for its all-gather. It takes the new one when it
next gathers the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from holdfast.spmd.base.spmd_errors import UnsupportedCall
from holdfast.spmd.base.torch_specs import local_of, spec_of, take_contents
from holdfast.spmd.sharding.gathered_views import is_gathered_view
from holdfast.spmd.sharding.partials import is_partial

# DTensors whose local tensor was replaced, until FSDP2 has seen it.
ASSIGNED: MutableMapping[DTensor, bool] = WeakIdKeyDictionary()


def _get_data(self: DTensor) -> torch.Tensor:
    return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]


def _set_data(self: DTensor, other: Any) -> None:
    """Share the local tensor of `other`; redistribute it first if its placements differ from the parameter's.

    A Partial, and a tensor that changes its shape, takes the placements of `other`. Raises UnsupportedCall for a plain
    tensor, another mesh, and a view of a sharded dim.
    """
    if not isinstance(other, DTensor):
        raise UnsupportedCall(
            "x.data = y of a DTensor x and a plain tensor y: distribute y first, "
            "distribute_tensor(y, x.device_mesh, x.placements)"
        )
    if other.device_mesh != self.device_mesh:
        raise UnsupportedCall(
            f"x.data = y of DTensors on two meshes, {self.device_mesh} and {other.device_mesh}: "
            "distribute_tensor(y.full_tensor(), x.device_mesh, x.placements) moves y"
        )
    if is_gathered_view(self):
        raise UnsupportedCall("x.data = y of an x that is a view of a sharded dim, a gathered copy: write x.copy_(y)")
    source: Any = other.detach()
    if is_gathered_view(source):
        source = source.clone()
    if source.shape == self.shape and not is_partial(self) and source.placements != self.placements:
        source = source.redistribute(placements=self.placements)
    torch.Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
    take_contents(self, local_of(source), spec_of(source))
    ASSIGNED[self] = True


DATA = property(_get_data, _set_data)


def seeing_assigned_data(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let FSDP2 take over the local tensors of parameters that were assigned, before it gathers them."""

    def unshard(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ASSIGNED and self.is_sharded:
            for parameter in self.fsdp_params:
                if ASSIGNED.pop(parameter.sharded_param, False):
                    parameter.reset_sharded_param()
        return original(self, *args, **kwargs)

    return unshard
