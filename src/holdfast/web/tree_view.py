"""Rows of the tree of a checkpoint's keys: one level at a time, alike layers folded; or the keys with a text."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

from holdfast.core.alike_numbers import folded_numbers
from holdfast.core.names import natural_key
from holdfast.web.open_steps import OpenStep
from holdfast.web.tensor_index import LevelItem, StepTensor


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
    with opened.lock:
        if query.text:
            return _filtered(opened, group, query)
        index = opened.index(group)
        items = sorted(index.level(query.prefix).items(), key=lambda item: natural_key(item[0]))
        entries = list(folded_numbers(items, index.look, unfold=not query.fold))
        depth = query.prefix.count(".") + 1 if query.prefix else 0
        rows: list[dict[str, Any]] = []
        for names, item in entries[query.offset : query.offset + query.limit]:
            prefix = f"{query.prefix}.{names[0]}" if query.prefix else names[0]
            shared = {
                "name": names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}",
                "prefix": prefix,
                "depth": depth,
                "alike": [int(name) for name in names] if len(names) > 1 else [],
            }
            if len(item.below) == 1 and item.own is None and not shared["alike"]:
                rows.append(_only_tensor(opened, group, query.prefix, shared, item.below[0]))
            else:
                rows += _entry_rows(opened, group, shared, item)
        return {"total": len(entries), "rows": rows}


def _only_tensor(opened: OpenStep, group: str, prefix: str, shared: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the row of the only tensor below a folder: `norm` with nothing but `weight` is `norm.weight`."""
    key = opened.index(group).keys[number]
    named = {**shared, "name": key[len(prefix) + 1 :] if prefix else key, "prefix": key}
    return {
        "kind": "tensor",
        **named,
        "children": 0,
        "tensors": 1,
        **tensor_fields(opened, opened.index(group).at(number)),
    }


def _entry_rows(opened: OpenStep, group: str, shared: dict[str, Any], item: LevelItem) -> list[dict[str, Any]]:
    """Return the row of an entry; two if a tensor and a part of other keys have one name."""
    rows = []
    index = opened.index(group)
    kind = "folded" if shared["alike"] else ""
    if item.below:
        facts = dict.fromkeys(("key", "shape", "dtype", "file", "offset", "blocks"))
        sizes = {"children": index.children(item), "tensors": len(item.below), "bytes": item.size}
        rows.append({"kind": kind or "folder", **shared, **facts, **sizes})
    if item.own is not None:
        fields = tensor_fields(opened, index.at(item.own))
        rows.append({"kind": kind or "tensor", **shared, "children": 0, "tensors": 1, **fields})
    return rows


def _filtered(opened: OpenStep, group: str, query: TreeQuery) -> dict[str, Any]:
    text, index = query.text.casefold(), opened.index(group)
    found = [number for number, key in enumerate(index.keys) if text in key.casefold()]
    end = query.offset + query.limit  # only these are put in order: the sort keys of all would take much memory
    ordered = heapq.nsmallest(end, found, key=lambda number: natural_key(index.keys[number]))
    rows = []
    for number in ordered[query.offset :]:
        key = index.keys[number]
        shared = {"name": key, "prefix": key, "depth": 0, "alike": [], "children": 0, "tensors": 1}
        rows.append({"kind": "tensor", **shared, **tensor_fields(opened, index.at(number))})
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
