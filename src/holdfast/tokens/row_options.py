"""Options for the rows of new tokens, checked: their initial values, and how many rows there are to be."""

from __future__ import annotations

from holdfast.core.errors import InvalidArgument

INITS = ("mean", "zero")


def check_init(init: str) -> str:
    """Return an option for initial values; raises InvalidArgument for an unknown one."""
    if init not in INITS:
        raise InvalidArgument(f"init={init!r}: choose {' or '.join(map(repr, INITS))}")
    return init


def rows_for(needed: int, rows: int, pad_to: int | None) -> int:
    """Return the rows of a vocabulary of `rows` that has to hold `needed` tokens: never fewer than before."""
    if pad_to is not None and (isinstance(pad_to, bool) or not isinstance(pad_to, int) or pad_to < 1):
        raise InvalidArgument(f"pad_to={pad_to!r}: a number of rows of at least 1, or None")
    if needed <= rows:
        return rows
    return -(-needed // (pad_to or 1)) * (pad_to or 1)
