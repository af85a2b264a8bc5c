"""The letters of `x[:, i] = v` and its like: dims that no index chooses from go along, and may be sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.spmd.base.call import Call
from holdfast.spmd.rules.pointwise.pointwise import LETTERS
from holdfast.spmd.sharding.index_checks import MASKS
from holdfast.spmd.sharding.signature import FIXED, Signature


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


def values_fit(call: Call, target: torch.Tensor) -> bool:
    """Whether what is put by integers can be broadcast to what they choose; True for masks, which are not looked at."""
    chosen = {dim: index for dim, index in enumerate(call["indices"]) if index is not None}
    if not chosen or any(index.dtype in MASKS for index in chosen.values()):
        return True
    if max(chosen) >= target.ndim or not _are_broadcast([index.shape for index in chosen.values()]):
        return False
    _, shape = _slots(chosen, target, LETTERS[: target.ndim])
    own = list(call["values"].shape)
    extra = max(0, len(own) - len(shape))
    return all(size == 1 for size in own[:extra]) and _are_broadcast([own[extra:], shape], shape)


def _are_broadcast(shapes: Sequence[Sequence[int]], to: Sequence[int] | None = None) -> bool:
    """Whether tensors of these shapes go together (and make one of the shape `to`)."""
    try:
        together = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return to is None or list(together) == list(to)


def _slots(chosen: dict[int, Any], target: torch.Tensor, letters: str) -> tuple[str, list[int]]:
    """The letters and sizes of what is put: the indices' dims stand where theirs were, or first if these are apart."""
    block = torch.broadcast_shapes(*(index.shape for index in chosen.values()))  # type: ignore[no-untyped-call]
    dims = sorted(chosen)
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    kept = [dim for dim in range(target.ndim) if dim not in chosen]
    before, after = [dim for dim in kept if dim < first], [dim for dim in kept if dim >= first]
    slots = "".join(letters[dim] for dim in before) + FIXED * len(block) + "".join(letters[dim] for dim in after)
    return slots, [*(target.shape[dim] for dim in before), *block, *(target.shape[dim] for dim in after)]
