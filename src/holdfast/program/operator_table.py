"""The operators that a program may call: a shipped table of aten overloads, the operations on sizes, and the blocks.

Nothing outside of it is ever looked up in torch. The table leaves out what makes or maps files, what replaces or
resizes storage, uninitialized memory, private operators that export does not use, and every other namespace.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from holdfast.program.graph import BLOCKS, ITEM

_TABLE = Path(__file__).with_name("operators.txt")
PREFIX = "aten."

# Operations on sizes in a graph: the number of arguments.
SIZE_OPERATIONS = {
    "size.add": 2,
    "size.sub": 2,
    "size.mul": 2,
    "size.floordiv": 2,
    "size.truediv": 2,
    "size.mod": 2,
    "size.pow": 2,
    "size.neg": 1,
    "size.min": 2,
    "size.max": 2,
    "size.int": 1,
    "size.float": 1,
    "size.eq": 2,
    "size.ne": 2,
    "size.lt": 2,
    "size.le": 2,
    "size.gt": 2,
    "size.ge": 2,
    "size.not": 1,
    "size.and": 2,
    "size.or": 2,
    "size.ite": 3,
}
OWN = frozenset({*SIZE_OPERATIONS, ITEM, *BLOCKS})


@cache
def allowed_overloads() -> frozenset[str]:
    """Return the aten overloads of the table, such as "aten.linear.default"."""
    lines = _TABLE.read_text(encoding="ascii").splitlines()
    return frozenset(PREFIX + line for line in lines if line and not line.startswith("#"))


def is_allowed(op: str) -> bool:
    return op in OWN or op in allowed_overloads()
