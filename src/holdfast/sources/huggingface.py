"""Read safetensors: Hugging Face folders with or without an index, adapters, numbered models, single files."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.core.names import ADAPTER, ADAPTER_CONFIG, ADAPTER_FILE, is_plain
from holdfast.format.safetensors import LENGTH_BYTES, decode_header, decode_index, header_bytes, require_indexed
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.torch_save.companions import read_companions
from holdfast.sources.trees.flat_optimizers import split_root
from holdfast.sources.trees.groups import result_of_tree
from holdfast.sources.trees.leaf import TensorLeaf
from holdfast.sources.trees.stored_blocks import stored_files

FORMAT = "Hugging Face"
_ENDING = ".safetensors"
_INDEX_ENDING = ".safetensors.index.json"
_SINGLE = "model.safetensors"
_FURTHER = re.compile(r"model_[0-9]{1,6}\.safetensors")
_NUMBERED = re.compile(r"(.+)-([0-9]{5,})-of-([0-9]{5,})\.safetensors")


def read_huggingface(folder: Folder) -> ReaderResult | None:
    """Return the weights of a folder or file as the group "model"; None if there is no safetensors file."""
    members, index = _members(folder), _index_of(folder)
    if not members:
        return None
    places: dict[str, Place] = {}
    for name in members:
        for place in safetensors_places(folder, name):
            if place.spec.key in places:
                raise Damaged(
                    f"{folder.path}: model has {place.spec.key!r} in two files, {places[place.spec.key].file} and "
                    f"{name}; if they are two models, open one of the files"
                )
            places[place.spec.key] = place
    if index is not None:
        held: dict[str, set[str]] = {name: set() for name in members}
        for key, place in places.items():
            held[place.file].add(key)
        require_indexed(_weight_map(folder, index), held, f"{folder.path}/{index}")
    leaves = {key: _leaf(place) for key, place in places.items()}
    companions = read_companions(folder)
    companions.trees |= _further_models(folder, members)
    if companions.trees or split_root(leaves, ())[1]:
        found = result_of_tree(FORMAT, companions.added_to(leaves), folder.path, companions.made)
        return companions.with_notes(found)
    is_adapter = list(members) == [ADAPTER_FILE] and ADAPTER_CONFIG in folder.files
    kind = ADAPTER if is_adapter else "module"
    groups = {"model": Group(kind, {key: leaf.recipe for key, leaf in leaves.items()})}
    return companions.with_notes(ReaderResult(FORMAT, Contents(groups, stored_files(groups.values(), folder.path))))


def _leaf(place: Place) -> TensorLeaf:
    return TensorLeaf(Recipe.whole(place, place.spec.shape, place.spec.dtype))


def _further_models(folder: Folder, members: Sequence[str]) -> dict[str, dict[str, TensorLeaf]]:
    """Return the additional models, as numbered by accelerate's save_state."""
    names = [name for name in folder.files if name not in members and _FURTHER.fullmatch(name)]
    names = names if folder.only is None else []
    return {
        name.removesuffix(_ENDING): {place.spec.key: _leaf(place) for place in safetensors_places(folder, name)}
        for name in names
    }


def safetensors_places(folder: Folder, name: str) -> Iterator[Place]:
    """Yield the tensors of one safetensors file, reading only its header."""
    where = f"{folder.path}/{name}"
    reader = folder.open(name)
    try:
        prefix = bytearray(min(LENGTH_BYTES, reader.size))
        reader.read_into(0, [memoryview(prefix)])
        data = bytearray(header_bytes(bytes(prefix), reader.size, where))
        reader.read_into(0, [memoryview(data)])
        size = reader.size
    finally:
        reader.close()
    for entry in decode_header(bytes(data), size, where):
        yield Place(TensorSpec(entry.key, entry.dtype, entry.shape), name, len(data) + entry.begin)


def _members(folder: Folder) -> Sequence[str]:
    if folder.only is not None:
        return [folder.only] if folder.only.endswith(_ENDING) or _is_safetensors(folder, folder.only) else []
    if _SINGLE in folder.files:
        return [_SINGLE]
    index = _index_of(folder)
    if index is not None:
        return _indexed(folder, index)
    found = [name for name in folder.files if name.endswith(_ENDING) and "/" not in name and is_plain(name)]
    _require_all_numbers(found, folder.path)
    return found


def _index_of(folder: Folder) -> str | None:
    """Return the index that lists the files, if one is needed and exists."""
    if folder.only is not None or _SINGLE in folder.files:
        return None
    indexes = [name for name in folder.files if name.endswith(_INDEX_ENDING) and "/" not in name and is_plain(name)]
    if f"model{_INDEX_ENDING}" in indexes:
        return f"model{_INDEX_ENDING}"
    return indexes[0] if len(indexes) == 1 else None


def _weight_map(folder: Folder, index: str) -> dict[str, str]:
    return decode_index(folder.read(index, limits.JSON_BYTES), f"{folder.path}/{index}")


def _is_safetensors(folder: Folder, name: str) -> bool:
    """Return True if a file with another suffix begins like a safetensors file."""
    start = bytearray(min(LENGTH_BYTES + 1, folder.files[name]))
    reader = folder.open(name)
    try:
        reader.read_into(0, [memoryview(start)])
    finally:
        reader.close()
    if len(start) <= LENGTH_BYTES or start[LENGTH_BYTES:] != b"{":
        return False
    length: int = struct.unpack("<Q", start[:LENGTH_BYTES])[0]
    return LENGTH_BYTES + length <= folder.files[name]


def _indexed(folder: Folder, index: str) -> list[str]:
    members = sorted(set(_weight_map(folder, index).values()))
    missing = [member for member in members if member not in folder.files]
    if missing:
        raise Damaged(f"{folder.path}: {index} names {missing[0]}, which is missing")
    return members


def _require_all_numbers(names: Sequence[str], where: str) -> None:
    """Raise Damaged if one of several numbered files is missing."""
    found: dict[tuple[str, int], set[int]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in found.items():
        if count > limits.MANIFEST_FILES or len(numbers) != count:
            raise Damaged(f"{where}: found {len(numbers)} files of {stem!r}, expected {count} from their names")
