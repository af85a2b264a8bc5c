"""Values of a program that is being translated: tensors, numbers that are known or are sizes, and lists of values."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.program.arguments import Ref
from holdfast.program.sizes import Size
from holdfast.sources.paddle.pir.pir_program import UNKNOWN, PirTensor

Number = bool | int | float | complex
Shape = tuple[Size | None, ...]

INTEGERS = frozenset({"int8", "uint8", "int16", "int32", "int64"})
FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class TensorOperand:
    """A tensor of the new program. `shape` has a symbol where the size is known by name, None where it is not."""

    ref: Ref
    type: PirTensor
    shape: Shape

    @property
    def rank(self) -> int:
        return len(self.type.shape)


@dataclass(frozen=True, slots=True)
class NumbersOperand:
    """A tensor of one dim or none whose elements are known: numbers, or references to sizes of inputs."""

    values: tuple[Number | Ref, ...]
    type: PirTensor

    @property
    def rank(self) -> int:
        return len(self.type.shape)


@dataclass(frozen=True, slots=True)
class ListOperand:
    """Several values that one operator takes or returns."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True, slots=True)
class AbsentOperand:
    """A result that the translation does not compute; refused if it is used."""

    name: str
    index: int


Operand = TensorOperand | NumbersOperand | ListOperand | AbsentOperand


def known_shape(kind: PirTensor, hint: Shape | None = None) -> Shape:
    """Return the sizes of a type, with those of `hint` in the place of unknown ones."""
    if hint is None or len(hint) != len(kind.shape):
        hint = (None,) * len(kind.shape)
    pairs = zip(kind.shape, hint, strict=True)
    return tuple(other if size == UNKNOWN and not isinstance(other, int) else _known(size) for size, other in pairs)


def _known(size: int) -> int | None:
    return None if size == UNKNOWN else size


def elements(shape: tuple[int, ...]) -> int:
    """Return the number of elements of a shape without unknown sizes."""
    total = 1
    for size in shape:
        total *= size
    return total
