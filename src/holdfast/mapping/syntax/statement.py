"""The values of the mapping language: keys with holes and arrays, options, statements, and their error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

from holdfast.core.errors import HoldfastError, Mismatch
from holdfast.format.dtypes import DType
from holdfast.mapping.syntax.place import excerpt

STAR = "*"
FLAGS = ("fused_ffn", "fused_qkv", "fused_qkv_old", "stack", "unstack", "optional")
OPTION_NAMES = (
    "axis", "sizes", "permute", "reshape", "src_shape", "parts", "num_heads", "num_key_value_groups", "tp_degree",
    "src_tp_degree", "dst_tp_degree", "dtype", "src_dtype", "dst_dtype",
)  # fmt: skip
UNKNOWN = DType("unknown", "", 0, "unknown")  # to explain shapes without dtypes

_SHOWN_CHARS = 200
_BARE = re.compile(r"(?:[A-Za-z0-9_./]|-(?!>))*")

Permutation = tuple[int, ...]


class Spec(Protocol):
    """The facts that a mapping needs about a tensor, as in `TensorSpec` and `Recipe`."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DType: ...


@dataclass(frozen=True, slots=True)
class Sized:
    """A shape and a dtype."""

    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Hole:
    """A run of digits in a key: an id or `*`. An offset is added to the id's value."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        if self.name == STAR:
            return STAR
        return f"${{{self.name}{self.offset:+}}}" if self.offset else f"${{{self.name}}}"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a statement: literal text and holes, optionally with `[begin:end]` and `^T`."""

    pieces: tuple[str | Hole, ...]
    array: tuple[int, int] | None = None
    transposed: bool = False
    column: int = field(default=0, compare=False)
    at: int = field(default=-1, compare=False)  # position in the text of its statement

    @property
    def holes(self) -> tuple[Hole, ...]:
        return tuple(piece for piece in self.pieces if isinstance(piece, Hole))

    @property
    def has_star(self) -> bool:
        return any(hole.name == STAR for hole in self.holes)

    @property
    def pattern(self) -> str:
        """The key as written, without `^T`."""
        text = "".join(map(_written, self.pieces, (*self.pieces[1:], None)))
        if text in (*FLAGS, *OPTION_NAMES, "_", ""):
            text = f'"{text}"'
        return text if self.array is None else f"{text}[{self.array[0]}:{self.array[1]}]"

    def __str__(self) -> str:
        return self.pattern + ("^T" if self.transposed else "")

    @property
    def count(self) -> int:
        """The number of keys that an array stands for."""
        return 1 if self.array is None else self.array[1] - self.array[0]

    def members(self) -> Iterator[Key]:
        """Yield the keys that an array stands for, or the key itself if it has no array."""
        if self.array is None:
            yield self
            return
        for number in range(*self.array):
            yield Key((*self.pieces, f"_{number}"), None, self.transposed, self.column, self.at)


def is_many(keys: tuple[Key, ...]) -> bool:
    """Return True if the keys can stand for several names."""
    return len(keys) > 1 or any(key.has_star or key.array is not None for key in keys)


def _written(piece: str | Hole, following: str | Hole | None) -> str:
    if isinstance(piece, Hole):
        text = str(piece)
        # `$LAYER_ID` is the usual form; braces are needed only where the next character would extend the name.
        plain = piece.name != STAR and not piece.offset
        separated = following is None or isinstance(following, Hole) or not re.match("[A-Z0-9_]", following)
        return f"${piece.name}" if plain and separated else text
    if _BARE.fullmatch(piece):
        return piece
    return '"' + piece.replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a statement.

    `sizes` are numbers, "equal", "targets" (taken from the targets) or, for fused heads, "any". `reshape` is the
    shape of the result, or "targets". `src_shape` is the shape before the reshape, which the reverse needs.
    """

    axis: int | None = None
    sizes: tuple[int, ...] | Literal["equal", "targets", "any"] | None = None
    parts: int | None = None
    permute: Permutation | None = None
    reshape: tuple[int, ...] | Literal["targets"] | None = None
    src_shape: tuple[int, ...] | None = None
    dtype: DType | None = None
    src_dtype: DType | None = None
    dst_dtype: DType | None = None
    fused: str | None = None
    stack: bool = False
    unstack: bool = False
    num_heads: int | None = None
    num_key_value_groups: int | None = None
    tp_degree: int | None = None
    src_tp_degree: int | None = None
    dst_tp_degree: int | None = None
    optional: bool = False

    @property
    def cast(self) -> DType | None:
        """The dtype that elements are cast to."""
        return self.dst_dtype if self.dtype is None else self.dtype

    def __str__(self) -> str:
        return "".join(f", {text}" for text in self._written())

    def _written(self) -> Iterator[str]:
        if self.fused is not None:
            yield self.fused
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "fused" or value is None or value is False:
                continue
            if value is True:
                yield option.name
            elif isinstance(value, DType):
                yield f"{option.name}='{value.name}'"
            elif option.name == "permute":
                yield f"permute='[{', '.join(map(str, value))}]'"
            else:
                yield f"{option.name}={list(value) if isinstance(value, tuple) else value}"


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement. Without left keys it adds, without right keys it removes. `aoa` marks AOA config statements."""

    lefts: tuple[Key, ...]
    rights: tuple[Key, ...]
    options: Options = Options()
    line: int = field(default=0, compare=False)
    column: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)
    origin: str = field(default="", compare=False)
    aoa: bool = field(default=False, compare=False)
    builtin: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        sides = (", ".join(map(str, keys)) or "_" for keys in (self.lefts, self.rights))
        return " -> ".join(sides) + str(self.options)

    @property
    def is_optional(self) -> bool:
        """True if the statement may match nothing."""
        return self.options.optional or self.aoa

    @property
    def stacks(self) -> bool:
        """True if the left keys become slices of a new dim."""
        return self.options.stack

    @property
    def unstacks(self) -> bool:
        """True if the right keys are the slices of a dim, which they lose."""
        return self.options.unstack

    @property
    def is_plain(self) -> bool:
        """True if tensors are unchanged except for their names."""
        options = self.options
        transposed = any(key.transposed for key in (*self.lefts, *self.rights))
        reordered = options.stack or options.unstack or options.permute is not None or options.reshape is not None
        return not (transposed or reordered) and options.cast is None and options.fused is None

    @property
    def where(self) -> str:
        return f"{self.origin}line {self.line}, column {self.column}"

    def error(self, what: str, leaf: type[HoldfastError] = Mismatch, key: Key | None = None) -> HoldfastError:
        """Return an error that locates the statement and says what is wrong; it points at `key`."""
        text = " ".join((self.text or str(self)).split())
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
        place = excerpt(self.text, key.at, len(key.pattern)) if self.text and key is not None and key.at >= 0 else ""
        return leaf(f"mapping, {self.where}: `{shown}`: {what}{place}")
