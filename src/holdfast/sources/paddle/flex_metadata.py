"""Parse the `.metadata` of a flex checkpoint: the file, box, run and dict path of each part of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.core.names import check_file, check_key
from holdfast.format.dtypes import DType, dtype_named, is_dtype
from holdfast.layout.box import Box
from holdfast.sources.foreign import Folder
from holdfast.sources.paddle.pdparams_pickle import sizes_of
from holdfast.sources.pickles import COMMON, Names, Record, read_pickle, records

_MODULES = ("paddle.distributed.flex_checkpoint.dcp.metadata", "paddle.distributed.checkpoint.metadata")
_CLASSES = ("Metadata", "LocalTensorMetadata", "LocalTensorIndex")
NAMES: Names = {**COMMON, **{key: made for module in _MODULES for key, made in records(module, *_CLASSES).items()}}


@dataclass(frozen=True, slots=True)
class FlexPiece:
    """A part of a tensor in one file: a box, or a run of elements of that box."""

    file: str
    box: Box
    run: tuple[int, int] | None
    dtype: DType | None


@dataclass(frozen=True, slots=True)
class FlexMetadata:
    """The shape, the pieces and the path of dict keys of every key."""

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[str, list[FlexPiece]]
    paths: Mapping[str, tuple[str, ...]]


def read_metadata(folder: Folder, name: str) -> FlexMetadata:
    """Read a metadata file; the files that it names are in the same folder."""
    where = f"{folder.path}/{name}"
    reader = folder.open(name)
    try:
        record = read_pickle(reader, where, NAMES).value
    finally:
        reader.close()
    if not isinstance(record, Record) or record.name.name != "Metadata":
        raise Damaged(f"{where}: not the metadata of a flex checkpoint")
    described = record.fields.get("state_dict_metadata")
    if not isinstance(described, dict):
        raise Damaged(f"{where}: no state_dict_metadata")
    head, slash, _ = name.rpartition("/")
    files = _files(record.fields.get("storage_metadata"), head + slash, where)
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, list[FlexPiece]] = {}
    for key, parts in described.items():
        if not isinstance(key, str) or not isinstance(parts, list) or not all(isinstance(p, Record) for p in parts):
            raise Damaged(f"{where}: the state_dict_metadata does not list the parts of tensors")
        check_key(key, where)
        pieces[key] = [_piece(key, part.fields, files, where) for part in parts]
        shapes[key] = _shape(key, [part.fields.get("global_shape") for part in parts], pieces[key], where)
    return FlexMetadata(shapes, pieces, _paths(record.fields.get("flat_mapping")))


def _files(located: Any, folder: str, where: str) -> dict[tuple[Any, ...], str]:
    """Map each part of a tensor to its file."""
    if not isinstance(located, dict):
        raise Damaged(f"{where}: no storage_metadata")
    files: dict[tuple[Any, ...], str] = {}
    for index, file in located.items():
        if not isinstance(index, Record) or not isinstance(file, str):
            raise Damaged(f"{where}: the storage_metadata does not map tensors to files")
        check_file(file, where)
        files[_identity(str(index.fields.get("tensor_key")), index.fields, where)] = folder + file
    return files


def _shape(key: str, by_layout: list[Any], pieces: list[FlexPiece], where: str) -> tuple[int, ...]:
    """Return the shape of the whole tensor. Older versions do not store it: it ends where the last piece does."""
    shapes = {sizes_of(shape) for shape in by_layout if shape is not None}
    ranks = {len(piece.box.sizes) for piece in pieces}
    if not shapes and len(ranks) == 1:
        return tuple(map(max, zip(*(piece.box.stops for piece in pieces), strict=True)))
    shape = shapes.pop() if len(shapes) == 1 else None
    if shape is None or ranks != {len(shape)}:
        raise Damaged(f"{where}: the parts of {key[:80]!r} do not agree on a global_shape")
    return shape


def _identity(key: str, fields: Mapping[str, Any], where: str) -> tuple[Any, ...]:
    """Return the identity of a part of a tensor."""
    offsets = sizes_of(fields.get("global_offset"))
    if offsets is None:
        raise Damaged(f"{where}: a part of {key[:80]!r} has no global_offset")
    return key, offsets, _run(fields, where)


def _run(fields: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    if fields.get("flattened_range") is None:
        return None
    run = sizes_of(fields["flattened_range"])
    if run is None or len(run) != 2:
        raise Damaged(f"{where}: a flattened_range must be two numbers")
    return run[0], run[1]


def _piece(key: str, fields: Mapping[str, Any], files: Mapping[tuple[Any, ...], str], where: str) -> FlexPiece:
    identity = _identity(key, fields, where)
    sizes = sizes_of(fields.get("local_shape"))
    if sizes is None or len(sizes) != len(identity[1]):
        raise Damaged(f"{where}: the part of {key[:80]!r} at {list(identity[1])} has no matching local_shape")
    file = files.get(identity)
    if file is None:
        raise Damaged(f"{where}: the part of {key[:80]!r} at {list(identity[1])} is in no file")
    name = fields.get("dtype")
    dtype = dtype_named(name) if isinstance(name, str) and is_dtype(name) else None
    return FlexPiece(file, Box(identity[1], sizes), identity[2], dtype)


def _paths(mapping: Any) -> dict[str, tuple[str, ...]]:
    """Return the path of dict keys of each flat key."""
    if not isinstance(mapping, dict):
        return {}
    return {
        key: tuple(path)
        for key, path in mapping.items()
        if isinstance(key, str) and isinstance(path, tuple | list) and all(isinstance(part, str) for part in path)
    }
