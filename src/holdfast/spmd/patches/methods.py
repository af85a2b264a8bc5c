"""Methods and functions of torch that act before DTensor's dispatcher is asked: what stands in for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.collective_errors import named
from holdfast.spmd.base.patched_function import StandIn
from holdfast.spmd.patches.mixed_meshes import clip_with_norm, parted, parted_lists, total_norm
from holdfast.spmd.patches.redistribute_strides import kept_in_order
from holdfast.spmd.patches.setitem import set_item
from holdfast.spmd.patches.sync_batch_norm import forward_of


def _tolist(self: DTensor) -> Any:
    with named("DTensor.tolist()", self):
        return self.full_tensor().tolist()


def _format(self: DTensor, words: str) -> str:
    """f"{loss:.4f}", as a plain tensor of no dims is formatted; without a format it is described, as torch does."""
    if not words or self.ndim or self.is_meta:
        return object.__format__(self, words)
    return format(self.detach().item(), words)


METHODS: dict[str, tuple[Any, str]] = {
    "tolist": (_tolist, "torch refuses it"),
    "__setitem__": (set_item, "torch loses what is written through a view of the sharded dim"),
    "__format__": (_format, 'f"{loss:.4f}" is refused'),
}


@dataclass(frozen=True, slots=True)
class Stand:
    """A function of torch, what makes ours of it, and why."""

    owner: Any
    name: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    why: str

    @property
    def title(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


MIXED = "torch refuses parameters of several meshes, or plain ones beside DTensors, in one list"
REFUSED = "torch refuses CPU tensors and DTensors"
MOVED = "torch forgets that a tensor was transposed or expanded when it moves it, and a view of the result raises"
MAKERS: dict[str, tuple[Any, str]] = {
    "grouping": (parted, MIXED),
    "lists": (parted_lists, MIXED),
    "total_norm": (total_norm, MIXED),
    "clip": (clip_with_norm, MIXED),
    "strides": (kept_in_order, MOVED),
}


def stands() -> list[Stand]:
    """Every function that is replaced."""
    return [
        Stand(nn.SyncBatchNorm, "forward", forward_of, REFUSED),
        Stand(nn.utils, "get_total_norm", total_norm, MIXED),
        Stand(nn.utils, "clip_grads_with_norm_", clip_with_norm, MIXED),
        *(Stand(owner, name, *MAKERS[role]) for role, owner, name in private.functions()),
    ]


def install_methods() -> list[StandIn]:
    """Put ours in place."""
    for name, (method, _) in METHODS.items():
        setattr(DTensor, name, method)
    return [StandIn(stand.owner, stand.name, stand.make) for stand in stands()]


def remove_methods() -> None:
    for name, (method, _) in METHODS.items():
        if vars(DTensor).get(name) is method:
            delattr(DTensor, name)
