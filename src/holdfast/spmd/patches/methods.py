"""The table and installation of all replaced methods and functions; tolist, format and deepcopy are written here."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.spmd.base.collective_errors import naming
from holdfast.spmd.base.patched_function import PatchedFunction
from holdfast.spmd.base.torch_dispatch import functions_to_patch
from holdfast.spmd.base.torch_specs import local_of, norms_in_float32, spec_of, wrap
from holdfast.spmd.patches.compile_guards import check_equal_specs, check_spec
from holdfast.spmd.patches.data_attribute import DATA, seeing_assigned_data
from holdfast.spmd.patches.mixed_meshes import clip_with_norm, grouped_by_mesh, lists_grouped_by_mesh, total_norm
from holdfast.spmd.patches.redistribute_strides import keep_strides
from holdfast.spmd.patches.setitem import set_item
from holdfast.spmd.patches.sync_batch_norm import forward_of
from holdfast.spmd.sharding.partials import is_partial
from holdfast.spmd.sharding.strided_shards import move_strided_apart


def _tolist(self: DTensor) -> Any:
    with naming("DTensor.tolist()", self):
        return self.full_tensor().tolist()


def _format(self: DTensor, spec: str) -> str:
    """Format f"{loss:.4f}" as a plain tensor without dims; without a format spec, describe it as torch does."""
    if not spec or self.ndim or self.is_meta:
        return object.__format__(self, spec)
    return format(self.detach().item(), spec)


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    """Copy a Partial as torch does, but through a clone of its local tensor: cloning the Partial reduces it."""
    if not is_partial(self) or not self.is_leaf or id(self) in memo:
        return torch.Tensor.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        copied = wrap(copy.deepcopy(local_of(self), memo), spec_of(self)).requires_grad_(self.requires_grad)
        copied.grad = copy.deepcopy(self.grad, memo)
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
    memo[id(self)] = copied
    return copied


METHODS: dict[str, tuple[Any, str]] = {
    "tolist": (_tolist, "torch refuses it"),
    "__setitem__": (set_item, "torch loses what is written through a view of the sharded dim"),
    "__format__": (_format, 'f"{loss:.4f}" is refused'),
    "__deepcopy__": (_deepcopy, "torch reduces a Partial to copy it"),
    "data": (DATA, "torch ignores what is assigned"),
}


@dataclass(frozen=True, slots=True)
class Replacement:
    """A function of torch, the maker of its replacement, and the reason."""

    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str

    @property
    def title(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


MIXED = "torch refuses parameters of several meshes, or plain ones and DTensors, in one list"
REFUSED = "torch refuses CPU tensors and DTensors"
MOVED = "torch forgets that a tensor was transposed or expanded when it moves it, and a view of the result raises"
OVERFLOWS = "torch raises the norms of shards to their power in half precision, which overflows"
STRIDED = "torch takes strided shards, of FSDP2 with TP and of flattened tensors, for plain ones when it moves them"
ASSIGNED_DATA = "FSDP2 gathers the local tensor that a parameter had before `parameter.data = other`"
REUSED = "a compiled graph runs for sizes with other shards if a rank has as many rows as before"
MAKERS: dict[str, tuple[Any, str]] = {
    "grouping": (grouped_by_mesh, MIXED),
    "lists": (lists_grouped_by_mesh, MIXED),
    "total_norm": (total_norm, MIXED),
    "clip": (clip_with_norm, MIXED),
    "strided_shards": (move_strided_apart, STRIDED),
    "half_norms": (norms_in_float32, OVERFLOWS),
    "strides": (keep_strides, MOVED),
    "unshard": (seeing_assigned_data, ASSIGNED_DATA),
    "guards": (check_spec, REUSED),
    "equal_specs": (check_equal_specs, REUSED),
}


def replacements() -> list[Replacement]:
    """Return every function that is replaced."""
    return [
        Replacement(nn.SyncBatchNorm, "forward", forward_of, REFUSED),
        Replacement(nn.utils, "get_total_norm", total_norm, MIXED),
        Replacement(nn.utils, "clip_grads_with_norm_", clip_with_norm, MIXED),
        *(Replacement(owner, name, *MAKERS[role]) for role, owner, name in functions_to_patch()),
    ]


def install_methods() -> list[PatchedFunction]:
    """Install the replacements."""
    for name, (method, _) in METHODS.items():
        setattr(DTensor, name, method)
    return [PatchedFunction(item.owner, item.name, item.make) for item in replacements()]


def remove_methods() -> None:
    for name, (method, _) in METHODS.items():
        if vars(DTensor).get(name) is method:
            delattr(DTensor, name)
