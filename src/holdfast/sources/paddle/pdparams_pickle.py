"""Pickles of `paddle.save`: numpy arrays as recipes over the file, split tensors rejoined, Paddle's tensor names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import check_key
from holdfast.format.dtypes import DType
from holdfast.layout.box import flat_boxes
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe, Term
from holdfast.sources.foreign import Folder
from holdfast.sources.paddle.unified_files import true_dtype
from holdfast.sources.pickles import (
    COMMON,
    NUMPY,
    Array,
    Encoded,
    FileSpan,
    Name,
    Names,
    array_of,
    is_array,
    is_scalar,
    read_pickle,
    scalar_value,
)
from holdfast.sources.pickles import span_bytes as bytes_of
from holdfast.storage.base import Reader

TABLE = "StructuredToParameterName@@"
_SPLIT = "UnpackBigParamInfor@@"  # Paddle's spelling
_ENCODED_BYTES = 256 * limits.MIB


def _tuple(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Build a tensor that is not at the top of a state dict: its name and its array."""
    (items,) = arguments
    if not isinstance(items, tuple | list) or len(items) > 16:
        raise TypeError("not a few items")
    return tuple(items)


def _no_bytes(arguments: tuple[Any, ...]) -> bytes:
    """Build an empty byte string, as protocol 2 writes it."""
    if arguments:
        raise TypeError("not empty")
    return b""


NAMES: Names = {
    **COMMON,
    **NUMPY,
    **{(module, "tuple"): _tuple for module in ("builtins", "__builtin__")},
    **{(module, "bytes"): _no_bytes for module in ("builtins", "__builtin__")},
}


@dataclass(slots=True)
class Arrays:
    """The arrays of a folder's pickles as places; `made` are arrays that no file stores in raw form."""

    folder: Folder
    made: dict[str, bytes] = field(default_factory=dict)
    _encoded_bytes: int = 0

    def read(self, name: str, names: Names = NAMES) -> dict[str, Any]:
        """Read the dict of one file, with recipes for its arrays. Raises Damaged if the file holds something else."""
        value = self.read_tree(name, names)
        if not isinstance(value, dict):
            kind = "tensor" if isinstance(value, Recipe) else type(value).__name__
            raise Damaged(f"{self.folder.path}/{name}: a {kind}, expected a dict of tensors")
        return value

    def read_tree(self, name: str, names: Names = NAMES) -> Any:
        """Read the value of one file: dicts, lists and tuples of recipes and plain values, at any depth."""
        where = f"{self.folder.path}/{name}"
        reader = self.folder.open(name)
        try:
            value = self._resolved(read_pickle(reader, where, names).value, name, reader, where)
            return self._joined(value, where) if isinstance(value, dict) else value
        finally:
            reader.close()

    @staticmethod
    def part(recipe: Recipe[Place], start: int, shape: tuple[int, ...]) -> Recipe[Place]:
        """Return a tensor of `shape` that shares the bytes of another one, starting at its element `start`."""
        (place,) = recipe.sources()
        begin = place.begin + start * recipe.dtype.bytes
        return _whole(place.file, begin, recipe.dtype, shape)

    def _resolved(self, value: Any, name: str, reader: Reader, where: str) -> Any:
        """Replace the arrays of a tree by recipes. Its depth was checked when it was read."""
        if isinstance(value, dict):
            return self._resolved_dict(value, name, reader, where)
        if _is_named_array(value):  # a tensor that is not at the top of a state dict
            value = value[1]
        if is_array(value):
            return self._recipe(array_of(value, where), name, reader, where)
        if isinstance(value, list | tuple):
            items = (self._resolved(item, name, reader, f"{where}[{number}]") for number, item in enumerate(value))
            return list(items) if isinstance(value, list) else tuple(items)
        if is_scalar(value):
            return scalar_value(value, where)
        if isinstance(value, FileSpan) and value.data is not None:
            return value.data
        return str(value) if isinstance(value, Name) else value

    def _resolved_dict(self, value: dict[Any, Any], name: str, reader: Reader, where: str) -> dict[str, Any]:
        """Replace the arrays of a dict by recipes, and record Paddle's names of the tensors that have one."""
        out: dict[str, Any] = {}
        table: dict[str, str] = {}
        for found, item in value.items():
            if type(found) not in (str, int):
                raise Unsupported(f"{where}: a key is a {type(found).__name__}, not a string or an integer")
            key = str(found)
            if key in out:
                raise Damaged(
                    f"{where}: the keys {key[:80]!r} and {key[:80]} are a string and an integer: save only one of them"
                )
            if _is_named_array(item):
                table[key] = item[0]
            out[key] = self._resolved(item, name, reader, f"{where}: {key[:80]!r}")
        return out if not table else {**out, TABLE: {**table, **_texts(out.get(TABLE))}}

    def _recipe(self, array: Array, name: str, reader: Reader, where: str) -> Recipe[Place]:
        if array.dtype.pair:
            raise Unsupported(f"{where}: an array of {array.dtype.name}, which is not supported in Paddle's files")
        dtype = true_dtype(array.dtype)
        shape = array.shape[::-1] if array.fortran else array.shape
        if not math.prod(shape):
            return Recipe(array.shape, dtype, ())
        file, begin = self._located(array, name, reader, where)
        recipe = _whole(file, begin, dtype, shape)
        return recipe.transposed() if array.fortran else recipe

    def _located(self, array: Array, name: str, reader: Reader, where: str) -> tuple[str, int]:
        """Return the file and offset of an array; an array stored in another form is decoded into memory."""
        if isinstance(array.data, FileSpan):
            return name, array.data.offset
        if isinstance(array.data, Encoded):
            self._encoded_bytes += array.data.text.size
            if self._encoded_bytes > _ENCODED_BYTES:
                raise Unsupported(
                    f"{where}: a pickle of protocol 2 has more than {_ENCODED_BYTES} bytes as text; "
                    "save it again with paddle.save(..., protocol=4)"
                )
        data = bytes_of(reader, array.data, where, _ENCODED_BYTES)
        expected = math.prod(array.shape) * array.dtype.bytes
        if len(data) != expected:
            raise Damaged(f"{where}: an array of {array.dtype.name}{list(array.shape)} has {len(data)} bytes")
        made = f"made:{name}:{len(self.made)}"
        self.made[made] = data
        return made, 0

    def _joined(self, value: dict[str, Any], where: str) -> dict[str, Any]:
        """Rebuild large tensors that Paddle split into runs of elements."""
        cuts = value.pop(_SPLIT, None)
        if cuts is None:
            return value
        for key, cut in cuts.items() if isinstance(cuts, dict) else ():
            names, shape = (cut.get("slices"), sizes_of(cut.get("OriginShape"))) if isinstance(cut, dict) else (0, None)
            if not isinstance(names, list) or shape is None:
                raise Damaged(f"{where}: {str(key)[:80]!r} is split, but its slices are not listed")
            check_key(key, where)
            parts = [value.pop(name, None) if isinstance(name, str) else None for name in names]
            value[key] = self._run(parts, shape, f"{where}: {key!r}")
        return value

    def _run(self, parts: list[Any], shape: tuple[int, ...], where: str) -> Recipe[Place]:
        """Build a tensor from consecutive runs of its elements."""
        terms: list[Term[Place]] = []
        at, dtype = 0, None
        for part in parts:
            if not isinstance(part, Recipe) or len(part.shape) != 1 or (dtype or part.dtype) is not part.dtype:
                raise Damaged(f"{where}: a part is missing or is not a run of its elements")
            dtype = part.dtype
            if at + part.shape[0] > math.prod(shape):
                raise Damaged(f"{where}: its parts have more elements than {list(shape)}")
            for box in flat_boxes(shape, at, at + part.shape[0]):
                (term,) = self.part(part, box.flat_offset(shape) - at, box.sizes).terms
                terms.append(replace(term, box=box))
            at += part.shape[0]
        if dtype is None or at != math.prod(shape):
            raise Damaged(f"{where}: its parts have {at} elements, but {list(shape)} has {math.prod(shape)}")
        return Recipe(shape, dtype, tuple(terms))


def _whole(file: str, begin: int, dtype: DType, shape: tuple[int, ...]) -> Recipe[Place]:
    """Return the recipe of a tensor stored in raw form; tensors stored once share one place, whatever their keys."""
    return Recipe.whole(Place(TensorSpec(f"@{begin}{list(shape)}", dtype, shape), file, begin), shape, dtype)


def _is_named_array(value: Any) -> bool:
    """Return True if a value is a pair of a tensor's Paddle name and its array."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str) and is_array(value[1])


def sizes_of(value: Any) -> tuple[int, ...] | None:
    """Return valid tensor sizes from a pickle; None for anything else."""
    good = isinstance(value, tuple | list) and len(value) <= limits.TENSOR_RANK
    if not good or not all(type(size) is int and 0 <= size < 2**60 for size in value):
        return None
    return tuple(value) if math.prod(max(1, size) for size in value) < 2**60 else None


def table_of(value: Mapping[str, Any]) -> dict[str, str]:
    """Return the Paddle name of each tensor of a state dict, by key."""
    return _texts(value.get(TABLE))


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {key: name for key, name in value.items() if isinstance(key, str) and isinstance(name, str)}
