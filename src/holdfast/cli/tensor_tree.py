"""The tree of keys that `holdfast show` prints: neighboring layers that are alike are one entry, as 0-31."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from holdfast.core.alike_numbers import folded_numbers
from holdfast.core.terminal import size_text

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
    """A part of keys between dots: the tensors that end here, and the parts below, in the order of keys."""

    rows: list[TreeRow] = field(default_factory=list)
    below: dict[str, TreeNode] = field(default_factory=dict)


Shape: TypeAlias = tuple[tuple[tuple[str, int, str], ...], tuple[tuple[str, "Shape"], ...]]


def tree_lines(rows: Sequence[TreeRow], *, unfold: bool) -> Iterator[str]:
    """Yield the lines of a tree. Without `unfold`, layers that differ in nothing but their number are one entry."""
    top = TreeNode()
    for row in rows:
        node = top
        for part in row.key.split(".", _DEPTH):
            node = node.below.setdefault(part, TreeNode())
        node.rows.append(row)
    yield from _lines(top, 1, unfold)


def state_rows(rows: Sequence[TreeRow]) -> list[TreeRow]:
    """Join the states of each parameter, whose keys are the parameter's and "/" and a name, into one row."""
    out = []
    for parameter, group in groupby(rows, lambda row: row.key.rpartition("/")[0] or row.key):
        states = list(group)
        if len(states) == 1 or any(state.suffix for state in states):
            out += states
            continue
        names: dict[str, list[str]] = {}
        for state in states:
            names.setdefault(state.kind, []).append(state.key.removeprefix(f"{parameter}/"))
        kinds = "; ".join(f"{', '.join(found)} {kind}" for kind, found in names.items())
        out.append(TreeRow(parameter, kinds, sum(state.size for state in states)))
    return out


def folded_keys(keys: Sequence[str]) -> Iterator[str]:
    """Yield keys in the order of the tree; those of layers that are alike are one, as `layers.0-31.weight`."""
    top = TreeNode()
    for key in keys:
        node = top
        for part in key.split(".", _DEPTH):
            node = node.below.setdefault(part, TreeNode())
        node.rows.append(TreeRow(key, "", 0))
    yield from _folded(top, "")


def _folded(node: TreeNode, before: str) -> Iterator[str]:
    for names, one in folded_numbers(node.below.items(), _shape):
        name = before + (names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}")
        yield from (name for _ in one.rows)
        yield from _folded(one, f"{name}.")


def _lines(node: TreeNode, depth: int, unfold: bool) -> Iterator[str]:
    for names, one in folded_numbers(node.below.items(), _shape, unfold=unfold):
        indent = "  " * depth
        name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        for row in one.rows:
            yield f"{indent}{name}  {row.kind}  {size_text(row.size)}{row.suffix}{_times(names)}"
        if one.below:
            yield f"{indent}{name}{_times(names)}"
            yield from _lines(one, depth + 1, unfold)


def _times(names: Sequence[str]) -> str:
    return f"  ({len(names)} alike)" if len(names) > 1 else ""


def _shape(node: TreeNode) -> Shape:
    """Return how a node looks, without its name."""
    rows = tuple((row.kind, row.size, row.suffix) for row in node.rows)
    return rows, tuple((name, _shape(child)) for name, child in node.below.items())
