"""Keys as a tree of their parts between dots; neighboring layers that are alike are one entry, as 0-31."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

_DEPTH = 40  # levels of the tree; what is deeper stays one name


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A tensor in the tree: its key, dtype with shape, bytes, and what is said after its size."""

    key: str
    kind: str
    size: int
    suffix: str = ""


@dataclass(slots=True)
class TreeNode:
    """A part of keys between dots: the tensors that end here, and the parts below, in the order of keys.

    `size` and `tensors` count everything in it.
    """

    rows: list[TreeRow] = field(default_factory=list)
    below: dict[str, TreeNode] = field(default_factory=dict)
    size: int = 0
    tensors: int = 0
    look: int = 0  # equal for nodes that look alike; 0 until it is asked for


def key_parts(key: str) -> list[str]:
    """Return the names of the nodes that lead to a key."""
    return key.split(".", _DEPTH)


class TensorTree:
    """The tree of some tensors."""

    def __init__(self, rows: Iterable[TreeRow]) -> None:
        self.top = TreeNode()
        self._looks: dict[object, int] = {}
        for row in rows:
            node = self.top
            for part in key_parts(row.key):
                node.size += row.size
                node.tensors += 1
                below = node.below.get(part)
                if below is None:
                    below = node.below[part] = TreeNode()
                node = below
            node.size += row.size
            node.tensors += 1
            node.rows.append(row)

    def entries(
        self, items: Iterable[tuple[str, TreeNode]], *, unfold: bool
    ) -> Iterator[tuple[list[str], TreeNode]]:
        """Yield the names of each entry with its node. Without `unfold`, numbers in a row that look alike are one."""
        numbered = enumerate(items)
        for _, members in groupby(numbered, lambda member: self._entry_key(member[0], *member[1], unfold=unfold)):
            found = [item for _, item in members]
            yield [name for name, _ in found], found[0][1]

    def _entry_key(self, position: int, name: str, node: TreeNode, *, unfold: bool) -> object:
        """Return what neighbors of one entry have in common: the way they look, and numbers that count up."""
        if unfold or not (name.isascii() and name.isdigit()):
            return position
        return (int(name) - position, self._look(node))

    def _look(self, node: TreeNode) -> int:
        """Return a number for how a node looks, without its name. Nodes are at most 41 levels deep."""
        if not node.look:
            rows = tuple((row.kind, row.size, row.suffix) for row in node.rows)
            key = rows, tuple(sorted((name, self._look(child)) for name, child in node.below.items()))
            node.look = self._looks.setdefault(key, len(self._looks) + 1)
        return node.look
