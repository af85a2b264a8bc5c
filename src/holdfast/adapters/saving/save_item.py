"""One tensor to save, as this rank holds it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from holdfast.adapters.tensors import Holder, part_view
from holdfast.format.dtypes import DType
from holdfast.layout.placement import ShardBox


@dataclass(frozen=True, slots=True, eq=False)
class SaveItem:
    """A tensor of which this rank holds parts: its group, key and role.

    `cast` is the dtype it is rounded to when written; `source` is the live tensor.
    """

    group: str
    key: str
    role: str  # "parameter", "buffer", "state" or "value"
    holder: Holder
    cast: DType | None = None
    source: weakref.ref[torch.Tensor] | None = None

    @property
    def stored(self) -> DType:
        return self.cast or self.holder.stored

    @property
    def logical(self) -> DType:
        return self.cast or self.holder.logical


def stored_view(item: SaveItem, part: ShardBox) -> torch.Tensor:
    """Return a part with the values stored in the file, still on its device."""
    view = part_view(item.holder, part)
    return view.to(getattr(torch, item.cast.name)) if item.cast else view
