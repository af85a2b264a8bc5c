"""Read exports of Paddle: the program in JSON, and `.pdiparams`, a stream of unnamed tensors that it names.

Each tensor has a version, its levels of detail, a version, a description (a protobuf message with dtype and dims)
and the elements. They are sorted by name; the names are in the program next to the file: `<stem>.json` of Paddle 3,
or `<stem>.pdmodel` before. They are those of the program's variables (`linear_0.w_0`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core import limits
from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.format.dtypes import DType, dtype_named
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.paddle.pir.exported_program import read_exported
from holdfast.sources.paddle.pir.pir_json import PROGRAM_BYTES, is_pir
from holdfast.sources.paddle.pir.pir_program import PirTensor
from holdfast.sources.paddle.protobuf import MalformedMessage, ProtobufMessage
from holdfast.sources.source_program import SourceProgram
from holdfast.sources.trees.stored_blocks import stored_files
from holdfast.storage.base import Reader

FORMAT = "paddle inference params"
FORMAT_ALONE = "paddle program"
_SUFFIX, _JSON = ".pdiparams", ".json"
_BEGIN_BYTES = 4096  # of a file, which begins with the mark of a program
_LEAST_BYTES = 64  # of a program
_PROGRAMS = 100  # JSON files that are looked into for a program
_DTYPES = {
    0: "bool", 1: "int16", 2: "int32", 3: "int64", 4: "float16", 5: "float32", 6: "float64", 20: "uint8", 21: "int8",
    22: "bfloat16", 23: "complex64", 24: "complex128", 32: "float8_e4m3fn", 33: "float8_e5m2",
}  # fmt: skip
_NOT_STORED = frozenset({9, 10, 15, 17})  # feed, fetch, reader, raw
_LEVELS, _DESCRIPTION_BYTES, _DIMS = 16, 4096, 64
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor of the stream, with the offset of its elements."""

    dtype: DType
    shape: Shape
    begin: int


def read_inference(folder: Folder) -> ReaderResult | None:
    """Return the contents of a `.pdiparams` file, or of a folder with one; None if there is none."""
    single = folder.only is not None and folder.only.endswith(_JSON)
    if single and not (_has_program(folder, folder.only or "") and folder.include(_weights_of(folder.only or ""))):
        return _program_alone(folder)
    names = sorted(name for name in folder.files if name.endswith(_SUFFIX) and "/" not in name)
    if not names:
        return _program_alone(folder)
    if len(names) > 1:
        raise Unsupported(f"{folder.path}: several models: {', '.join(names[:10])}; open one of the files")
    name = names[0]
    where = f"{folder.path}/{name}"
    keys, program, source = _program(folder, name.removesuffix(_SUFFIX), where)
    reader = folder.open(name)
    try:
        stored = list(_stream(reader, where))
    finally:
        reader.close()
    _check(keys, stored, where, program)
    tensors: dict[str, Recipe[Place]] = {}
    for key, tensor in zip(sorted(keys), stored, strict=True):
        spec = TensorSpec(key, tensor.dtype, tensor.shape)
        tensors[key] = Recipe.whole(Place(spec, name, tensor.begin), tensor.shape, tensor.dtype)
    groups = {"model": Group("module", tensors)}
    note = f"names are those of the variables of {program}; linear weights are [in, out], as in Paddle"
    notes = (note,) if source is None else (note, source.note)
    contents = Contents(groups, stored_files(groups.values(), folder.path))
    return ReaderResult(FORMAT, contents, notes=notes, program=source)


def _weights_of(program: str) -> str:
    return program.removesuffix(_JSON) + _SUFFIX


def _has_program(folder: Folder, name: str) -> bool:
    """Return True if the beginning of a file is that of a Paddle program."""
    return is_pir(folder.read_begin(name, _BEGIN_BYTES))


def _program_alone(folder: Folder) -> ReaderResult | None:
    """Return the contents of a program without weights next to it; None if there is no program."""
    names = sorted(
        name for name, size in folder.files.items() if name.endswith(_JSON) and "/" not in name and size >= _LEAST_BYTES
    )
    names = [name for name in names if _has_program(folder, name)] if len(names) <= _PROGRAMS else []
    if not names:
        return None
    if len(names) > 1:
        raise Unsupported(f"{folder.path}: several programs: {', '.join(names[:10])}; open one of the files")
    where = f"{folder.path}/{names[0]}"
    source = read_exported(folder.read(names[0], PROGRAM_BYTES), where)
    if source is None:
        return None
    keys = [parameter.key for parameter in source.plain.parameters]
    note = (
        f"{where} has no weights"
        if not keys
        else (
            f"the weights of {where} are missing: {len(keys)} tensors, such as {keys[0]!r}, in {_weights_of(names[0])}"
        )
    )
    contents = Contents({"model": Group("module", {})}, ())
    read = frozenset(names)
    return ReaderResult(FORMAT_ALONE, contents, notes=(note, source.note), read=read, program=source)


def _check(keys: dict[str, Shape | None], stored: list[_Stored], where: str, program: str) -> None:
    if len(keys) != len(stored):
        raise Damaged(
            f"{where}: {len(stored)} tensors, but {program} names {len(keys)}: are they from different models?"
        )
    for key, tensor in zip(sorted(keys), stored, strict=True):
        wanted = keys[key]
        if wanted is not None and wanted != tensor.shape:
            raise Damaged(
                f"{where}: the tensor at byte {tensor.begin} has the shape {list(tensor.shape)}, but {program} says "
                f"{list(wanted)} for {key!r}: are they from different models?"
            )


def _stream(reader: Reader, where: str) -> Iterator[_Stored]:
    """Yield the tensors of the stream, reading only their headers."""
    at, count = 0, 0
    while at < reader.size:
        count += 1
        if count > limits.HEADER_TENSORS:
            raise Damaged(f"{where}: more than {limits.HEADER_TENSORS} tensors")
        tensor = _header(reader, at, where)
        at = tensor.begin + TensorSpec("", tensor.dtype, tensor.shape).bytes
        if at > reader.size:
            raise Damaged(
                f"{where}: the tensor at byte {tensor.begin} would end at {at}, but the file ends at {reader.size}"
            )
        yield tensor


def _header(reader: Reader, at: int, where: str) -> _Stored:
    version, levels = struct.unpack("<IQ", _bytes(reader, at, 12, where))
    if version or levels > _LEVELS:
        raise Damaged(f"{where}: no tensor begins at byte {at}: version {version}, {levels} levels of detail")
    at += 12
    for _ in range(levels):
        at += 8 + int(struct.unpack("<Q", _bytes(reader, at, 8, where))[0])
    version, size = struct.unpack("<Ii", _bytes(reader, at, 8, where))
    if version or not 0 <= size <= _DESCRIPTION_BYTES:
        raise Damaged(f"{where}: no tensor description begins at byte {at}: version {version}, {size} bytes")
    dtype, shape = _described(_bytes(reader, at + 8, size, where), f"{where}: at byte {at + 8}")
    return _Stored(dtype, shape, at + 8 + size)


def _bytes(reader: Reader, at: int, size: int, where: str) -> bytes:
    if at + size > reader.size:
        raise Damaged(f"{where}: the file ends at byte {reader.size}, inside the tensor header at {at}")
    data = bytearray(size)
    reader.read_into(at, [memoryview(data)])
    return bytes(data)


def _described(data: bytes, where: str) -> tuple[DType, Shape]:
    """Parse the dtype and shape of a TensorDesc message."""
    try:
        message = ProtobufMessage(data)
        code, dims = message.number(1), tuple(message.numbers(2))
    except MalformedMessage as problem:
        raise Damaged(f"{where}: not a tensor description: {problem}") from None
    if code not in _DTYPES:
        raise Unsupported(f"{where}: a tensor of Paddle's type {code}, which Holdfast does not support")
    if len(dims) > _DIMS or any(not 0 <= size < 2**48 for size in dims):
        raise Damaged(f"{where}: a tensor with invalid dims {list(dims)[:8]}")
    return dtype_named(_DTYPES[code]), dims


def _program(folder: Folder, stem: str, where: str) -> tuple[dict[str, Shape | None], str, SourceProgram | None]:
    """Return the parameters of the program next to the file, with their shapes, its file name, and the program."""
    for name in (f"{stem}{_JSON}", f"{stem}.pdmodel"):
        try:
            data = folder.read(name, limits.JSON_BYTES)
        except NotFound:
            continue
        place = f"{folder.path}/{name}"
        if not name.endswith(_JSON):
            return _model_parameters(data, place), name, None
        source = read_exported(data, place)
        if source is not None:
            return _parameters(source), name, source
    raise Unsupported(
        f"{where}: its tensors have no names; put the program saved with it into the same folder, {stem}.json or "
        f"{stem}.pdmodel"
    )


def _parameters(source: SourceProgram) -> dict[str, Shape | None]:
    """Return the parameters of a Paddle 3 program with their shapes, where these are known."""
    out: dict[str, Shape | None] = {}
    for parameter in source.plain.parameters:
        kind = parameter.type
        out[parameter.key] = kind.shape if isinstance(kind, PirTensor) and min(kind.shape, default=0) >= 0 else None
    return out


def _model_parameters(data: bytes, where: str) -> dict[str, Shape | None]:
    """Return the persistable variables of a program description (`.pdmodel`), except feeds and fetches."""
    out: dict[str, Shape | None] = {}
    try:
        for block in ProtobufMessage(data).messages(1):
            for variable in block.messages(3):
                kind = variable.message(2)
                if not variable.number(3) or kind is None or kind.number(1) in _NOT_STORED:
                    continue
                tensor = kind.message(3)
                desc = None if tensor is None else tensor.message(1)
                dims = () if desc is None else tuple(desc.numbers(2))
                out[variable.text(1)] = dims if desc is not None and all(size >= 0 for size in dims) else None
    except MalformedMessage as problem:
        raise Damaged(f"{where}: not a Paddle program: {problem}") from None
    return out
