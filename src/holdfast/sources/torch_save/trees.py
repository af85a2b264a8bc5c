"""The value of a torch.save file as a tree whose tensors and arrays are leaves; numpy arrays kept in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.format.dtypes import dtype_named
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.sources.pickles import (
    Array,
    FileSpan,
    Name,
    Record,
    array_of,
    is_array,
    is_scalar,
    path_text,
    scalar_value,
    span_bytes,
)
from holdfast.sources.torch_save.archive import Archive
from holdfast.sources.torch_save.torch_names import PickledTensor
from holdfast.sources.torch_save.views import view_recipe
from holdfast.sources.trees.leaf import TensorLeaf, dotted
from holdfast.storage.base import Reader

_MADE = ".made"
_ARRAY_BYTES = 64 * 1024 * 1024


class TreeBuilder:
    """Builds trees from the values of one file. `made` collects bytes that the file stores in another form."""

    def __init__(self, file: str, reader: Reader, where: str) -> None:
        self._file = file
        self._reader = reader
        self._where = where
        self._made = bytearray()
        self._known: dict[tuple[PickledTensor, int], TensorLeaf] = {}

    @property
    def made(self) -> dict[str, bytes]:
        """Files in memory that the recipes refer to."""
        return {self._made_file: bytes(self._made)} if self._made else {}

    @property
    def _made_file(self) -> str:
        return f"{self._file}{_MADE}"

    def tree(self, value: Any, storages: Mapping[str, tuple[int, int]], path: tuple[object, ...] = ()) -> Any:
        """Return the tree of a value, whose depth was checked when it was read."""
        if isinstance(value, dict):
            return {key: self.tree(item, storages, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = (self.tree(item, storages, (*path, index)) for index, item in enumerate(value))
            return list(items) if isinstance(value, list) else tuple(items)
        if isinstance(value, PickledTensor):
            return self._tensor(value, storages, dotted(path))
        if isinstance(value, Record):
            return self._record(value, storages, path)
        if isinstance(value, FileSpan):
            return value.data
        return str(value) if isinstance(value, Name) else value

    def _tensor(self, tensor: PickledTensor, storages: Mapping[str, tuple[int, int]], key: str) -> TensorLeaf:
        """Return the leaf of a tensor; a tensor that appears several times is one leaf, under its first key."""
        begin, size = storages[tensor.storage.key]
        known = self._known.get((tensor, begin))
        if known is None:
            recipe = view_recipe(tensor, key, self._file, begin, size, self._where)
            known = TensorLeaf(recipe, tensor.dtype if recipe.dtype.name != tensor.dtype else None)
            self._known[tensor, begin] = known
        return known

    def _record(self, record: Record, storages: Mapping[str, tuple[int, int]], path: tuple[object, ...]) -> Any:
        where = f"{self._where}: {dotted(path)[:80]!r}"
        if is_array(record):
            return self._array(array_of(record, where), dotted(path), where)
        if is_scalar(record):
            return scalar_value(record, where)
        text = path_text(record)
        return text if text is not None else self.tree(record.fields, storages, path)

    def _array(self, array: Array, key: str, where: str) -> TensorLeaf:
        dtype = dtype_named(array.dtype.stored)
        shape = tuple(reversed(array.shape)) if array.fortran else array.shape
        shape = (*shape, 2) if array.dtype.pair else shape
        if isinstance(array.data, FileSpan):
            file, begin = self._file, array.data.offset
        else:
            data = span_bytes(self._reader, array.data, where, _ARRAY_BYTES)
            file, begin = self._made_file, len(self._made)
            self._made += data + bytes(-len(data) % 8)
            if len(data) != math.prod(shape) * dtype.bytes:
                raise Damaged(f"{where}: an array of {len(data)} bytes, expected {math.prod(shape) * dtype.bytes}")
        recipe = Recipe.whole(Place(TensorSpec(key, dtype, shape), file, begin), shape, dtype)
        if array.fortran:
            dims = len(array.shape)
            recipe = recipe.permuted((*range(dims - 1, -1, -1), *range(dims, len(shape))))
        return TensorLeaf(recipe, array.dtype.name if array.dtype.name != dtype.name else None)


def tree_of(archive: Archive, file: str, reader: Reader, where: str) -> tuple[Any, dict[str, bytes]]:
    """Return the tree of a torch.save file, and the files in memory that it refers to."""
    builder = TreeBuilder(file, reader, where)
    return builder.tree(archive.value, archive.storages), builder.made
