"""Rows of the tree of a checkpoint's keys: one level at a time, alike layers folded; or the keys that contain a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.tensor_tree import TreeNode, key_parts
from holdfast.core.errors import NotFound
from holdfast.core.names import natural_key
from holdfast.web.open_steps import OpenStep, StepTensor


@dataclass(frozen=True, slots=True)
class TreeQuery:
    """A request for rows of a tree."""

    prefix: str = ""
    text: str = ""
    fold: bool = True
    offset: int = 0
    limit: int = 200


def tree_rows(opened: OpenStep, group: str, query: TreeQuery) -> dict[str, Any]:
    """Return one level of the tree of a group, or the keys that contain a text."""
    tree = opened.tree(group)
    if query.text:
        return _filtered(opened, group, query)
    node = tree.top
    for part in key_parts(query.prefix) if query.prefix else ():
        below = node.below.get(part)
        if below is None:
            raise NotFound(f"the group {group} has no keys that begin with {query.prefix[:200]!r}")
        node = below
    items = sorted(node.below.items(), key=lambda item: natural_key(item[0]))
    entries = list(tree.entries(items, unfold=not query.fold))
    shown = entries[query.offset : query.offset + query.limit]
    depth = len(key_parts(query.prefix)) if query.prefix else 0
    rows: list[dict[str, Any]] = []
    for names, one in shown:
        prefix = f"{query.prefix}.{names[0]}" if query.prefix else names[0]
        rows += _entry_rows(opened, group, names, one, prefix, depth)
    return {"total": len(entries), "rows": rows}


def _entry_rows(
    opened: OpenStep, group: str, names: list[str], node: TreeNode, prefix: str, depth: int
) -> list[dict[str, Any]]:
    """Return the row of an entry; two if a tensor and a part of other keys have one name."""
    name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
    shared = {"name": name, "prefix": prefix, "depth": depth, "alike": [int(one) for one in names] if len(names) > 1 else []}
    rows = []
    if node.below:
        kind = "folded" if len(names) > 1 else "folder"
        inner = node.tensors - len(node.rows)
        size = node.size - sum(row.size for row in node.rows)
        facts: dict[str, Any] = dict.fromkeys(("shape", "dtype", "file", "offset", "blocks"))
        rows.append(
            {"kind": kind, "key": None, **shared, "children": len(node.below), "tensors": inner, "bytes": size, **facts}
        )
    for row in node.rows:
        kind = "folded" if len(names) > 1 else "tensor"
        fields = tensor_fields(opened, opened.tensor(group, row.key))
        rows.append({"kind": kind, **shared, "children": 0, "tensors": 1, **fields})
    return rows


def _filtered(opened: OpenStep, group: str, query: TreeQuery) -> dict[str, Any]:
    text = query.text.casefold()
    found = sorted((key for key in opened.keys(group) if text in key.casefold()), key=natural_key)
    rows = []
    for key in found[query.offset : query.offset + query.limit]:
        fields = tensor_fields(opened, opened.tensor(group, key))
        rows.append(
            {"kind": "tensor", "name": key, "prefix": key, "depth": 0, "alike": [], "children": 0, "tensors": 1, **fields}
        )
    return {"total": len(found), "rows": rows}


def tensor_fields(opened: OpenStep, tensor: StepTensor) -> dict[str, Any]:
    """Return the fields of a tensor's row."""
    first, after = opened.blocks(tensor)
    return {
        "key": tensor.key,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.bytes,
        "file": tensor.file,
        "offset": tensor.begin,
        "blocks": after - first,
    }
