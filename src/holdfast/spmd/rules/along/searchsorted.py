"""searchsorted: every value is looked up independently, in a full sequence."""

from __future__ import annotations

from typing import Any

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.signature import FIXED, LETTERS, Signature, run_sharded


def searchsorted(call: Call) -> Any:
    """Shard the values along any dim, and the sequences along the dims that they share with the values."""
    sequence, values = call["sorted_sequence"], call["self"]
    if values.ndim == 0 or sequence.ndim not in (1, values.ndim):
        return USE_TORCH
    letters = LETTERS[: values.ndim]
    own = FIXED if sequence.ndim == 1 else letters[:-1] + FIXED
    sorter = () if call["sorter"] is None else (own,)
    return run_sharded(call, Signature((own, letters, *sorter), (letters,), letters))


RULES = [
    Rule("along", ("searchsorted.Tensor",), "every dim of the values", "torch has no strategy", searchsorted),
]
