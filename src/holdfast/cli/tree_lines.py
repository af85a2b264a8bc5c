"""The tree of keys that `holdfast show` prints: a line for each tensor and each part of keys above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.checkpoint.tensor_tree import TensorTree, TreeNode, TreeRow
from holdfast.core.terminal import size_text


def tree_lines(rows: Sequence[TreeRow], *, unfold: bool) -> Iterator[str]:
    """Yield the lines of a tree. Without `unfold`, layers that differ in nothing but their number are one entry."""
    tree = TensorTree(rows)
    yield from _lines(tree, tree.top, 1, unfold)


def _lines(tree: TensorTree, node: TreeNode, depth: int, unfold: bool) -> Iterator[str]:
    for names, one in tree.entries(node.below.items(), unfold=unfold):
        indent = "  " * depth
        name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
        for row in one.rows:
            yield f"{indent}{name}  {row.kind}  {size_text(row.size)}{row.suffix}{_times(names)}"
        if one.below:
            yield f"{indent}{name}{_times(names)}"
            yield from _lines(tree, one, depth + 1, unfold)


def _times(names: Sequence[str]) -> str:
    return f"  ({len(names)} alike)" if len(names) > 1 else ""
