"""Read a folder of torch DCP: rebuild the saved dict and its lists, with Megatron's common values and TP degree."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from holdfast.core.errors import Damaged, HoldfastError
from holdfast.sources.dcp.chunks import leaf_of
from holdfast.sources.dcp.items import DcpItems
from holdfast.sources.dcp.metadata import METADATA, DcpMetadata, read_metadata
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.torch_save.archive import read_archive
from holdfast.sources.torch_save.trees import TreeBuilder, tree_of
from holdfast.sources.trees.groups import result_of_tree
from holdfast.sources.trees.leaf import has_leaf

FORMAT = "torch DCP"
_COMMON = "common.pt"  # written by Megatron
_COMMON_KEY = "common_state/shard_0_1"  # where newer versions of Megatron store the same
_LEFT_OUT = {  # of Megatron's: neither weights of the model nor the state of parameters
    "_extra_state of Megatron's layers, which only its own classes can read": r".+\._extra_state/shard_[0-9.]+_[0-9.]+",
    "buffers of Megatron's distributed optimizer, which name no parameters; with --dist-ckpt-optim-fully-reshardable "
    "Megatron saves its state by parameter": r"(?:chained_[0-9]+\.)?optimizer\.distributed\.dp_group_idx_.+",
}
_NOTES = 20


def read_dcp(folder: Folder) -> ReaderResult | None:
    """Return the contents of a torch.distributed.checkpoint folder; None for another folder."""
    if METADATA not in folder.files or folder.only is not None:
        return None
    reader = folder.open(METADATA)
    try:
        metadata = read_metadata(reader, f"{folder.path}/{METADATA}")
    finally:
        reader.close()
    items, notes = DcpItems(folder), list[str]()
    try:
        tree, made = _tree(folder, metadata, items, notes)
    finally:
        items.close()
    common = _common(folder, notes) or _common_of(tree.pop(_COMMON_KEY, None))
    for text, pattern in _LEFT_OUT.items():
        kept = {name: value for name, value in tree.items() if not re.fullmatch(pattern, str(name))}
        if len(kept) < len(tree):
            notes.append(f"left out: {len(tree) - len(kept)} {text}")
        tree = kept
    notes += _left_out_options(common.get("optimizer"))
    known = {str(name) for name in tree} | {"optimizer"}
    tree |= {name: value for name, value in common.items() if name not in known and not has_leaf(value)}
    result = result_of_tree(FORMAT, tree, folder.path, made)
    contents = replace(result.contents, tp_degree=_tp_degree(common))
    read = frozenset({METADATA, *(item.file for item in metadata.values.values()), _COMMON, "metadata.json"})
    return replace(result, contents=contents, notes=(*result.notes, *notes[:_NOTES]), read=read)


def _tree(
    folder: Folder, metadata: DcpMetadata, items: DcpItems, notes: list[str]
) -> tuple[dict[Any, Any], dict[str, bytes]]:
    """Rebuild the saved dict, with its tensors as leaves."""
    tree: dict[Any, Any] = {}
    builders: dict[str, TreeBuilder] = {}
    for key, stored in metadata.tensors.items():
        _put(tree, metadata.paths[key], leaf_of(key, stored, items, folder.path), folder.path)
    for key, item in metadata.values.items():
        where = f"{folder.path}/{item.file}: {key[:80]!r}"
        try:
            archive = items.archive(item, where)
            builder = builders.setdefault(item.file, TreeBuilder(item.file, items.reader(item.file), folder.path))
            value = builder.tree(archive.value, archive.storages, (key,))
        except HoldfastError as error:
            notes.append(f"left out: {error}")
            continue
        _put(tree, metadata.paths[key], value, folder.path)
    made = {name: data for builder in builders.values() for name, data in builder.made.items()}
    return {name: _with_lists(value, str(name)) for name, value in tree.items()}, made


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any, where: str) -> None:
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise Damaged(f"{where}: the path {'.'.join(map(str, path))[:80]!r} leads through a tensor or a value")
    if path[-1] in node:
        raise Damaged(f"{where}: two entries have the path {'.'.join(map(str, path))[:80]!r}")
    node[path[-1]] = value


def _with_lists(value: Any, name: str) -> Any:
    """Turn dicts whose keys are 0, 1, 2 and so on back into lists, except the states of an optimizer."""
    if not isinstance(value, dict):
        return value
    inner = {key: _with_lists(item, str(key)) for key, item in value.items()}
    if name == "state" or not inner or set(inner) != set(range(len(inner))):
        return inner
    return [inner[index] for index in range(len(inner))]


def _common(folder: Folder, notes: list[str]) -> Mapping[str, Any]:
    """Return the plain values that Megatron stores next to the tensors."""
    if _COMMON not in folder.files:
        return {}
    where = f"{folder.path}/{_COMMON}"
    reader = folder.open(_COMMON)
    try:
        tree, _ = tree_of(read_archive(reader, where), _COMMON, reader, where)
    except HoldfastError as error:
        notes.append(f"left out: {error}")
        return {}
    finally:
        reader.close()
    return _common_of(tree)


def _common_of(tree: Any) -> Mapping[str, Any]:
    """Return values by name, from a dict or the only item of a list."""
    inner = tree[0] if isinstance(tree, list) and len(tree) == 1 else tree
    return {name: value for name, value in inner.items() if type(name) is str} if isinstance(inner, dict) else {}


def _left_out_options(optimizer: Any) -> list[str]:
    """Return a note about Megatron's param groups: they name no parameters, and are stored apart from the state."""
    groups = list(_param_groups(optimizer))
    if not groups:
        return []
    names = ", ".join(dict.fromkeys(str(name)[:40] for group in groups for name in group if name != "params"))
    return [
        f"left out: the options of {len(groups)} param groups of Megatron's optimizer, which name no parameters: set "
        f"them anew, the step count too ({names[:300]})"
    ]


def _param_groups(value: Any, depth: int = 3) -> Iterator[Mapping[Any, Any]]:
    """Yield the param groups of an optimizer, or of several that are chained."""
    if not isinstance(value, dict | list) or depth == 0:
        return
    groups = value.get("param_groups") if isinstance(value, dict) else None
    if isinstance(groups, list):
        yield from (group for group in groups if isinstance(group, dict))
        return
    for inner in value.values() if isinstance(value, dict) else value:
        yield from _param_groups(inner, depth - 1)


def _tp_degree(common: Mapping[str, Any]) -> int | None:
    options = common.get("args")
    degree = options.get("tensor_model_parallel_size") if isinstance(options, dict) else None
    return degree if type(degree) is int and 0 < degree < 2**20 else None
