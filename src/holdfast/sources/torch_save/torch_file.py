"""Read torch.save checkpoints: choose a single file or `pytorch_model*.bin` by its index, and build contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import is_plain
from holdfast.format.safetensors import decode_index, require_indexed
from holdfast.sources.deepspeed import reject_sharded_content
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.parts import part_by_content
from holdfast.sources.torch_save.archive import is_torch_file, read_archive
from holdfast.sources.torch_save.companions import Companions, is_companion, read_companions
from holdfast.sources.torch_save.trees import tree_of
from holdfast.sources.trees.groups import result_of_tree

FORMAT = "torch"
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_SINGLE = "pytorch_model.bin"
_INDEX = "pytorch_model.bin.index.json"
_START_BYTES = 16


def read_torch(folder: Folder) -> ReaderResult | None:
    """Return the contents of a torch.save file; None if there is none or the choice is ambiguous."""
    members = _members(folder)
    if not members:
        return None
    tree: dict[Any, Any] = {}
    made: dict[str, bytes] = {}
    held: dict[str, Any] = {}
    for name in members:
        part, own = _read(folder, name)
        if len(members) == 1:
            _require_keys(folder, {name: part})
            return _found(folder, part, f"{folder.path}/{name}", own)
        if not isinstance(part, dict) or not part.keys().isdisjoint(tree):
            raise Damaged(
                f"{folder.path}/{name}: not a shard of a model: it is not a dict, or repeats keys of another shard"
            )
        tree |= part
        held[name] = part
        made |= own
    _require_keys(folder, held)
    return _found(folder, tree, folder.path, made)


def _found(folder: Folder, tree: Any, where: str, made: Mapping[str, bytes]) -> ReaderResult:
    """Return the contents of a tree and of the files that a trainer wrote next to it."""
    reject_sharded_content(tree, where)
    partial = part_by_content(tree)
    companions = read_companions(folder) if isinstance(tree, dict) else Companions()
    tree = companions.added_to(tree) if companions.trees else tree
    found = result_of_tree(FORMAT, tree, where, {**made, **companions.made}, unwrap_ddp=True)
    return replace(companions.with_notes(found), partial=partial)


def _members(folder: Folder) -> Sequence[str]:
    if folder.only is not None:
        return [folder.only] if _is_torch(folder, folder.only) else []
    if _SINGLE in folder.files:
        return [_SINGLE]
    if _INDEX in folder.files:
        return _indexed(folder)
    found = [name for name in folder.files if name.endswith(_ENDINGS) and "/" not in name and is_plain(name)]
    models = [name for name in found if not is_companion(name)]
    found = models or [name for name in found if name.startswith("optimizer")]
    return found if len(found) == 1 and _is_torch(folder, found[0]) else []


def _indexed(folder: Folder) -> list[str]:
    members = sorted(set(_weight_map(folder).values()))
    for name in members:
        if name not in folder.files:
            raise Damaged(f"{folder.path}: {_INDEX} names {name[:80]!r}, which is missing")
    return members


def _weight_map(folder: Folder) -> dict[str, str]:
    return decode_index(folder.read(_INDEX, limits.JSON_BYTES), f"{folder.path}/{_INDEX}")


def _require_keys(folder: Folder, held: Mapping[str, Any]) -> None:
    """Raise Damaged if the index, where it is used, names a key that its file lacks."""
    if folder.only is None and _SINGLE not in folder.files and _INDEX in folder.files:
        parts = {name: part if isinstance(part, dict) else {} for name, part in held.items()}
        require_indexed(_weight_map(folder), parts, f"{folder.path}/{_INDEX}")


def _is_torch(folder: Folder, name: str) -> bool:
    size = min(_START_BYTES, folder.files[name])
    reader = folder.open(name)
    try:
        start = bytearray(size)
        reader.read_into(0, [memoryview(start)])
    finally:
        reader.close()
    return is_torch_file(bytes(start))


def _read(folder: Folder, name: str) -> tuple[Any, dict[str, bytes]]:
    where = f"{folder.path}/{name}"
    if not _is_torch(folder, name):
        raise Unsupported(f"{where}: not a torch.save file")
    reader = folder.open(name)
    try:
        return tree_of(read_archive(reader, where), name, reader, where)
    finally:
        reader.close()
