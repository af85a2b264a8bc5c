"""The tensors of one group as columns: a hundred thousand of them in a few megabytes, and levels of their tree."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.tensor_header import read_header
from holdfast.core.errors import Damaged, NotFound
from holdfast.format.dtypes import dtype_named
from holdfast.format.header_columns import HeaderColumns, scan_header
from holdfast.format.safetensors import TensorEntry
from holdfast.sources.foreign import Foreign

_LEVELS = 32  # that are kept
DEPTH = 40  # levels of the tree; what is deeper stays one name


@dataclass(frozen=True, slots=True)
class StepTensor:
    """A tensor as the page shows it; without a file, it is put together from several places."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str | None
    begin: int | None
    end: int | None


@dataclass(slots=True)
class LevelItem:
    """A name of one level of the tree: the tensor of this name if there is one, and what is below it."""

    start: int  # where the keys go on after the name
    own: int | None = None
    below: list[int] = field(default_factory=list)
    size: int = 0  # of what is below


@dataclass(frozen=True, slots=True)
class _TensorKind:
    """The facts that many tensors have in common. `file` is None for one that is put together from several places."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str | None


class TensorIndex:
    """The tensors of a group by number, in the order of their files."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self._begins: array[int] = array("q")
        self._kinds: array[int] = array("l")
        self._kind_of: list[_TensorKind] = []
        self._numbers: dict[_TensorKind, int] = {}
        self._at: dict[str, int] = {}
        self._levels: OrderedDict[str, dict[str, LevelItem]] = OrderedDict()

    def _add(self, key: str, kind: _TensorKind, begin: int) -> None:
        number = self._numbers.setdefault(kind, len(self._kind_of))
        if number == len(self._kind_of):
            self._kind_of.append(kind)
        self.keys.append(key)
        self._begins.append(begin)
        self._kinds.append(number)

    def __len__(self) -> int:
        return len(self.keys)

    def at(self, number: int) -> StepTensor:
        """Return a tensor by its number."""
        kind, begin = self._kind_of[self._kinds[number]], self._begins[number]
        end = begin + kind.bytes
        where = (None, None, None) if kind.file is None else (kind.file, begin, end)
        return StepTensor(self.keys[number], kind.dtype, kind.shape, kind.bytes, *where)

    def find(self, key: str) -> StepTensor | None:
        """Return a tensor by its key."""
        if not self._at:
            self._at = {known: number for number, known in enumerate(self.keys)}
        number = self._at.get(key)
        return None if number is None else self.at(number)

    def level(self, prefix: str) -> dict[str, LevelItem]:
        """Return the names that follow a prefix; raises NotFound without any."""
        if prefix in self._levels:
            self._levels.move_to_end(prefix)
            return self._levels[prefix]
        found: dict[str, LevelItem] = {}
        start = len(prefix) + 1 if prefix else 0
        is_last = prefix.count(".") + 1 >= DEPTH if prefix else False
        stem = f"{prefix}." if prefix else ""
        sizes = [kind.bytes for kind in self._kind_of]
        kinds = self._kinds
        for number, key in enumerate(self.keys):
            if not key.startswith(stem):
                continue
            end = -1 if is_last else key.find(".", start)
            end = -1 if end == start else end  # a part without a name: the rest of the key is one name
            name = key[start:] if end < 0 else key[start:end]
            item = found.get(name)
            if item is None:
                item = found[name] = LevelItem(start + len(name) + 1)
            if end < 0:
                item.own = number
            else:
                item.below.append(number)
                item.size += sizes[kinds[number]]
        if not found:
            raise NotFound(f"there are no keys that begin with {prefix[:200]!r}")
        self._levels[prefix] = found
        while len(self._levels) > _LEVELS:
            self._levels.popitem(last=False)
        return found

    def look(self, item: LevelItem) -> Hashable:
        """Return what two names of a level have in common if they look alike: all below, but not the files."""
        own = None if item.own is None else self._look_kind(item.own)
        if not item.below:
            return own
        keys, start = self.keys, item.start
        return own, frozenset((keys[number][start:], self._look_kind(number)) for number in item.below)

    def children(self, item: LevelItem) -> int:
        """Return how many names follow an item of a level."""
        keys, start = self.keys, item.start
        return len({keys[number][start:].partition(".")[0] for number in item.below})

    def _look_kind(self, number: int) -> tuple[str, tuple[int, ...]]:
        kind = self._kind_of[self._kinds[number]]
        return kind.dtype, kind.shape


def index_group(checkpoint: Checkpoint, group: str) -> TensorIndex:
    """Read the headers of a group's files, or what a reader of another format found."""
    index = TensorIndex()
    if isinstance(checkpoint, Foreign):
        _index_foreign(checkpoint, group, index)
        return index
    record = checkpoint.manifest.groups[group]
    for file in record.files:
        header, columns = _columns(checkpoint, file)
        kinds = [_TensorKind(dtype.name, shape, -1, file) for dtype, shape in columns.kind_of]
        for number, key in enumerate(columns.keys):
            begin, end = columns.begins[number], columns.ends[number]
            kind = kinds[columns.kinds[number]]
            if kind.bytes < 0:
                kind = kinds[columns.kinds[number]] = _TensorKind(kind.dtype, kind.shape, end - begin, file)
            if key in record.logical_dtypes:
                logical = record.logical_dtypes[key]
                shape = kind.shape[:-1] if dtype_named(logical).pair else kind.shape
                kind = _TensorKind(logical, shape, end - begin, file)
            index._add(key, kind, header + begin)
    if len(set(index.keys)) != len(index.keys):
        raise Damaged(f"{checkpoint.path}: {group} has a key in two files")
    return index


def _columns(checkpoint: Checkpoint, file: str) -> tuple[int, HeaderColumns]:
    """Return the size of a file's header, and its tensors."""
    record = checkpoint.manifest.files[file]
    data = read_header(checkpoint.open_file(file), record, f"{checkpoint.path}/{file}")
    columns = scan_header(data, record.size)
    if columns is None:
        columns = HeaderColumns()
        for place in checkpoint.stored_file(file).places:  # raises for a damaged header
            begin, end = place.begin - len(data), place.end - len(data)
            columns.add(TensorEntry(place.spec.key, place.spec.dtype, place.spec.shape, begin, end))
    return len(data), columns


def _index_foreign(checkpoint: Foreign, group: str, index: TensorIndex) -> None:
    for key in checkpoint.contents.groups[group].tensors:
        tensor = checkpoint.find(key, group)
        places = tensor.recipe.sources()
        is_one = len(places) == 1 and tensor.recipe.is_whole(places[0].spec.shape)
        file = places[0].file if is_one else None
        kind = _TensorKind(tensor.logical, tensor.logical_shape, tensor.bytes, file)
        index._add(key, kind, places[0].begin if is_one else 0)
