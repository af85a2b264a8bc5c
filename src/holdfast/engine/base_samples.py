"""Comparison of a live base model with the folder it is said to come from, by samples of every tensor's elements.

A few elements of each tensor tell weights that were trained, merged or freshly initialized from those of the
folder. Each rank compares its own shards and reads a few pages of each file. Weights that are quantized in memory and
not in the folder cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from holdfast.core.errors import HoldfastError
from holdfast.sources import open_stored

if TYPE_CHECKING:
    import torch

    from holdfast.adapters.peft import BaseTensors
    from holdfast.plan.contents import Contents, StoredTensor

_SAMPLES = 8  # of each part that this rank holds


def differing_key(base: BaseTensors, folder: Path) -> str | None:
    """Return the first key whose values differ from those in a folder or are not there, "" if all agree.

    None if nothing can be compared: the folder cannot be read, or has other keys or dtypes than the model. A stage of
    a pipeline that holds no tensor of the base has nothing that differs.
    """
    if not base.tensors:
        return ""
    try:
        contents = open_stored(folder).contents
    except HoldfastError:
        return None
    group = "model" if "model" in contents.groups else next(iter(contents.groups), "")
    found: set[int] = set()
    missing: dict[str, int] = {}
    for key, tensor in base.tensors.items():
        stored = _find(contents, group, key, base.prefix)
        if stored is None:
            missing[key] = id(tensor)
            continue
        found.add(id(tensor))
        if stored.recipe.is_whole(stored.shape) and _differs(tensor, stored, folder, key):
            return key
    if not found:
        return None
    return next((key for key, own in missing.items() if own not in found and not base.renamed), "")


def _find(contents: Contents, group: str, key: str, prefix: str) -> StoredTensor | None:
    """Return a tensor by its key, with or without the prefix of the inner model, as transformers loads it."""
    names = [key, f"{prefix}.{key}", key.removeprefix(f"{prefix}.")] if prefix else [key]
    return next((stored for name in names if (stored := contents.find(group, name)) is not None), None)


def _differs(tensor: torch.Tensor, stored: StoredTensor, folder: Path, key: str) -> bool:
    import torch

    from holdfast.adapters.subclass_tensors import is_subclass
    from holdfast.adapters.tensors import holder_of

    if is_subclass(tensor):  # quantized: its elements are not those of the folder
        return False
    holder = holder_of(tensor, key)
    if _is_packed(holder, stored):
        return False
    if tuple(holder.shape) != tuple(stored.shape):
        return True
    place = next(iter(stored.recipe.sources()))
    dtype = getattr(torch, stored.dtype.name)
    if not dtype.is_floating_point or not holder.local.dtype.is_floating_point:
        return False
    item = stored.dtype.bytes
    for at, own in _samples(holder):
        raw = np.memmap(folder / place.file, np.uint8, "r", place.begin, stored.bytes).reshape(-1, item)[at]
        theirs = torch.frombuffer(bytearray(raw.tobytes()), dtype=dtype).to(holder.local.dtype)
        if not torch.equal(own.nan_to_num(), theirs.nan_to_num()):
            return True
    return False


def _is_packed(holder: Any, stored: StoredTensor) -> bool:
    """Return True for weights of bitsandbytes in 4 bits: two of the stored elements in each byte, of any shape."""
    held, count = math.prod(holder.shape) * holder.local.dtype.itemsize, math.prod(stored.shape)
    return len(holder.shape) == 2 and holder.shape[1] == 1 and held == (count + 1) // 2


def _samples(holder: Any) -> Iterator[tuple[np.ndarray[Any, Any], torch.Tensor]]:
    """Yield the positions of some elements in the whole tensor, and their values on this rank."""
    import torch

    from holdfast.adapters.tensors import part_view

    for part in holder.parts:
        count = part.box.volume
        if not count:
            continue
        inside = np.unique(np.linspace(0, count - 1, _SAMPLES).astype(np.int64))
        index = np.unravel_index(inside, part.box.sizes) if part.box.sizes else ()
        at = inside
        if part.box.sizes:
            whole = tuple(own + offset for own, offset in zip(index, part.box.offsets, strict=True))
            at = np.ravel_multi_index(whole, holder.shape)
        view = part_view(holder, part)
        chosen = tuple(torch.as_tensor(own, device=view.device) for own in index)
        yield at, (view[chosen] if chosen else view.reshape(1)).cpu()
