"""The `.metadata` of torch DCP: a pickle of dataclasses, read as inert records and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import check_file
from holdfast.format.dtypes import dtype_named, is_dtype
from holdfast.layout.box import Box
from holdfast.sources.pickles import COMMON, Name, Names, Record, read_pickle, records
from holdfast.sources.torch_save.torch_names import TORCH
from holdfast.storage.base import Reader

METADATA = ".metadata"
_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING",
)  # fmt: skip
_NAMES: Names = {
    **COMMON,
    **TORCH,
    **records(_MODULE, *_CLASSES),
    **records(_OLD_MODULE, "TensorProperties", "MEM_FORMAT_ENCODING"),
    **records("torch.distributed.checkpoint.filesystem", "_StorageInfo", "_StoragePrefix"),
    **records("torch.distributed.checkpoint.planner_helpers", "_StorageInfo"),
    # Megatron keeps the plans of the save in the metadata. Nothing here needs them.
    **records(
        "torch.distributed.checkpoint.planner",
        *("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"),
    ),
    **records("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", "MCoreSavePlan"),
}
_ELEMENTS = 2**58
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True)
class StreamLocation:
    """The location of one torch.save stream."""

    file: str
    begin: int
    size: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor: its dtype and shape, and the items that store its boxes.

    `original` is the shape before Megatron flattened the grid cells of the tensor, None for most tensors.
    """

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, StreamLocation], ...]
    original: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class DcpMetadata:
    """The contents of a checkpoint: tensors and other values by flat key, and the path of every key."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, StreamLocation]
    paths: Mapping[str, tuple[str | int, ...]]


def read_metadata(reader: Reader, where: str) -> DcpMetadata:
    """Read the metadata of a checkpoint without executing the pickle."""
    top = read_pickle(reader, where, _NAMES).value
    if not isinstance(top, Record) or top.name.name not in ("Metadata", "MCoreMetadata"):
        raise Damaged(f"{where}: not the metadata of a checkpoint")
    items = dict(_items(_dict(top.fields.get("storage_data"), "storage_data", where), where))
    entries = _dict(top.fields.get("state_dict_metadata"), "state_dict_metadata", where)
    originals = top.fields.get("mcore_data")
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, StreamLocation] = {}
    for key, entry in entries.items():
        if type(key) is not str or not isinstance(entry, Record):
            raise Damaged(f"{where}: an entry is neither a tensor nor a value")
        if entry.name.name == "TensorStorageMetadata":
            tensors[key] = _tensor(key, entry, items, _original(originals, key, where), where)
        elif (key, None) in items:
            values[key] = items[key, None]
    return DcpMetadata(tensors, values, _paths(top.fields.get("planner_data"), entries))


def _dict(value: Any, name: str, where: str) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise Damaged(f"{where}: {name} is not a dict")
    return value


def _items(storage: Mapping[Any, Any], where: str) -> Iterator[tuple[tuple[str, Any], StreamLocation]]:
    for index, info in storage.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise Damaged(f"{where}: storage_data has an entry that is not an index with its location")
        key, offset = index.fields.get("fqn"), index.fields.get("offset")
        if type(key) is not str:
            raise Damaged(f"{where}: an index has no key")
        yield (key, None if offset is None else _sizes(offset, key, where)), _item(key, info, where)


def _item(key: str, info: Record, where: str) -> StreamLocation:
    file, begin, size = (info.fields.get(name) for name in ("relative_path", "offset", "length"))
    if info.fields.get("transform_descriptors"):
        names = str(info.fields["transform_descriptors"])[:80]
        raise Unsupported(f"{where}: {key[:80]!r} was written with the transform {names!r}, which is not supported")
    if type(file) is not str or type(begin) is not int or type(size) is not int or begin < 0 or size < 0:
        raise Damaged(f"{where}: {key[:80]!r} has no file, offset or length")
    check_file(file, where)
    return StreamLocation(file, begin, size)


def _sizes(value: Any, key: str, where: str) -> tuple[int, ...]:
    good = isinstance(value, tuple | list) and len(value) <= limits.TENSOR_RANK
    if not good or not all(type(size) is int and 0 <= size < 2**60 for size in value):
        raise Damaged(f"{where}: {key[:80]!r} has an invalid shape or offset")
    if math.prod(max(1, size) for size in value) >= _ELEMENTS:
        raise Damaged(f"{where}: {key[:80]!r} has a shape that is too large")
    return tuple(value)


def _tensor(
    key: str,
    entry: Record,
    items: Mapping[tuple[str, Any], StreamLocation],
    original: tuple[int, ...] | None,
    where: str,
) -> DcpTensor:
    shape = _sizes(entry.fields.get("size"), key, where)
    chunks = entry.fields.get("chunks")
    if not isinstance(chunks, list) or not all(isinstance(chunk, Record) for chunk in chunks):
        raise Damaged(f"{where}: {key[:80]!r} has no list of chunks")
    found: dict[Box, StreamLocation] = {}
    for chunk in chunks:
        box = Box(_sizes(chunk.fields.get("offsets"), key, where), _sizes(chunk.fields.get("sizes"), key, where))
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape) or not Box.full(shape).contains(box):
            raise Damaged(f"{where}: {key[:80]!r} of shape {list(shape)} has a chunk outside that shape")
        item = items.get((key, box.offsets))
        if item is None:
            raise Damaged(f"{where}: {key[:80]!r} has a chunk at {list(box.offsets)} that is in no file")
        found[box] = item
    return DcpTensor(_dtype(entry, key, where), shape, tuple(found.items()), original)


def _dtype(entry: Record, key: str, where: str) -> str:
    properties = entry.fields.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    name = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(name, Name) or not is_dtype(name.name):
        raise Unsupported(f"{where}: {key[:80]!r} has an unsupported dtype: {str(name)[:60]!r}")
    return dtype_named(name.name).name


def _original(originals: Any, key: str, where: str) -> tuple[int, ...] | None:
    entry = originals.get(key) if isinstance(originals, dict) else None
    shape = entry.get(_ORIGINAL_SHAPE) if isinstance(entry, dict) else None
    return None if shape is None else _sizes(shape, key, where)


def _paths(planner: Any, entries: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every key in the saved dict; a key without a path is its own path."""
    paths: dict[str, tuple[str | int, ...]] = {}
    for key in entries:
        path: Any = planner.get(key, ()) if isinstance(planner, dict) else ()
        good = isinstance(path, tuple | list) and 0 < len(path) <= limits.TENSOR_RANK
        paths[key] = tuple(path) if good and all(type(part) in (str, int) for part in path) else (key,)
    return paths
