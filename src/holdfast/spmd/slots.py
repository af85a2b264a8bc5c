"""The letters of `x[:, i] = v` and its like: dims that no index chooses from go along, and may be sharded."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.spmd.agreement import MASKS
from holdfast.spmd.call import Call
from holdfast.spmd.rules.pointwise import LETTERS
from holdfast.spmd.ways import FIXED, Signature


def slices_put(call: Call, target: torch.Tensor) -> Signature | None:
    """Of an index_put by integers into a copy; None for masks, and for what is written in place."""
    indices, values = call["indices"], call["values"]
    chosen = {dim: index for dim, index in enumerate(indices) if index is not None}
    if call.is_inplace or not chosen or any(index.dtype in MASKS for index in chosen.values()):
        return None
    letters = "".join(FIXED if dim in chosen else LETTERS[dim] for dim in range(target.ndim))
    slots, shape = _slots(chosen, target, letters)
    if values.ndim > len(slots):
        return None
    start = len(slots) - values.ndim
    own = "".join(
        letter if size == whole else FIXED
        for letter, size, whole in zip(slots[start:], values.shape, shape[start:], strict=True)
    )
    keys = (FIXED * index.ndim for index in chosen.values())
    return Signature((letters, *keys, own), (letters,), letters.replace(FIXED, ""))


def _slots(chosen: dict[int, Any], target: torch.Tensor, letters: str) -> tuple[str, list[int]]:
    """The letters and sizes of what is put: the indices' dims stand where theirs were, or first if these are apart."""
    block = torch.broadcast_shapes(*(index.shape for index in chosen.values()))  # type: ignore[no-untyped-call]
    dims = sorted(chosen)
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    kept = [dim for dim in range(target.ndim) if dim not in chosen]
    before, after = [dim for dim in kept if dim < first], [dim for dim in kept if dim >= first]
    slots = "".join(letters[dim] for dim in before) + FIXED * len(block) + "".join(letters[dim] for dim in after)
    return slots, [*(target.shape[dim] for dim in before), *block, *(target.shape[dim] for dim in after)]
