"""`PirCall`: one operator of a Paddle program as its rule sees it, with checked attributes and operands."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from holdfast.core.errors import Unsupported
from holdfast.program.arguments import DeviceValue, DtypeValue, Ref, Value
from holdfast.program.sizes import Size
from holdfast.sources.paddle.pir.pir_operands import (
    ListOperand,
    Number,
    NumbersOperand,
    Operand,
    Shape,
    TensorOperand,
)
from holdfast.sources.paddle.pir.pir_program import OpaqueAttribute, PirOperator, PirTensor, PirType

# Attributes that say where an operator came from or where it ran.
_IGNORED = frozenset(
    {"struct_name", "place", "op_role", "op_dist_attr", "op_callstack", "stop_gradient", "persistable"}
)
_T = TypeVar("_T")


def made_like(dtype: str) -> dict[str, Value]:
    """Return the arguments of an operator that makes a tensor where the weights are."""
    return {"dtype": DtypeValue(dtype), "device": DeviceValue("model")}


class ProgramBuilder(Protocol):
    """The program that is being made, as far as rules use it."""

    def operand(self, number: int) -> Operand | None: ...
    def rebind(self, number: int, result: int, operand: Operand) -> None: ...
    def tensor(self, operand: Operand) -> TensorOperand | None: ...
    def constant(self, array: Any, kind: PirTensor) -> TensorOperand: ...
    def emit(
        self,
        op: str,
        args: tuple[Value, ...],
        kwargs: dict[str, Value] | None = None,
        kind: PirTensor | None = None,
        hint: Shape | None = None,
    ) -> TensorOperand: ...
    def emit_several(
        self,
        op: str,
        args: tuple[Value, ...],
        kinds: tuple[PirTensor, ...],
        kwargs: dict[str, Value] | None = None,
        hint: Shape | None = None,
    ) -> ListOperand: ...
    def size(self, operand: TensorOperand, dim: int) -> int | Ref: ...
    def compute_size(self, op: str, *terms: Number | Ref) -> Ref: ...
    def size_name(self, size: Number | Ref) -> Size | None: ...


class PirCall:
    """One operator: every problem names it, and every attribute has to be read."""

    def __init__(self, builder: ProgramBuilder, operator: PirOperator, where: str) -> None:
        self.builder = builder
        self.operator = operator
        self._where = where
        self._read: set[str] = set(_IGNORED)

    def refuse(self, reason: str) -> Unsupported:
        """Return the error for a use of the operator that has no counterpart."""
        return Unsupported(f"{self._where}: {self.operator.name}: {reason}: it has no checked aten counterpart")

    def check_attributes(self) -> None:
        """Raise Unsupported for an attribute that the rule does not know."""
        for name in self.operator.attributes:
            if name not in self._read:
                raise self.refuse(f"the unknown attribute {name[:80]!r}")

    # Attributes.

    def attribute(self, name: str, kind: type[_T], default: _T | None = None) -> _T:
        """Return an attribute; raises Unsupported if it is missing or of another kind."""
        self._read.add(name)
        value = self.operator.attributes.get(name, default)
        if kind is float and type(value) is int:
            value = float(value)
        if isinstance(value, OpaqueAttribute):
            raise self.refuse(f"the attribute {name!r} is {value.kind}")
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.refuse(f"the attribute {name!r} is not {kind.__name__}")
        return value

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        values = self.attribute(name, tuple, default)
        if not all(type(value) is int for value in values):
            raise self.refuse(f"the attribute {name!r} is not a list of integers")
        return values

    def ignore(self, *names: str) -> None:
        """Accept attributes that do not change what is computed."""
        self._read.update(names)

    def require(self, name: str, *values: Any) -> None:
        """Raise Unsupported unless an attribute that the operator may have is one of these."""
        self._read.add(name)
        found = self.operator.attributes.get(name, values[0])
        if found not in values:
            raise self.refuse(f"{name}={str(found)[:80]!r}")

    # Inputs.

    @property
    def count(self) -> int:
        """The number of inputs."""
        return len(self.operator.inputs)

    def operand(self, index: int) -> Operand | None:
        if index >= self.count:
            return None
        return self.builder.operand(self.operator.inputs[index])

    def tensor(self, index: int) -> TensorOperand:
        """Return an input as a tensor."""
        found = self.maybe_tensor(index)
        if found is None:
            raise self.refuse(f"the input {index + 1} is missing")
        return found

    def maybe_tensor(self, index: int) -> TensorOperand | None:
        operand = self.operand(index)
        if operand is None:
            return None
        found = self.builder.tensor(operand)
        if found is None:
            raise self.refuse(f"the input {index + 1} is not a tensor")
        return found

    def maybe_ref(self, index: int) -> Ref | None:
        found = self.maybe_tensor(index)
        return None if found is None else found.ref

    def tensors(self, index: int) -> tuple[TensorOperand, ...]:
        """Return an input that is a list of tensors."""
        operand = self.operand(index)
        items = operand.items if isinstance(operand, ListOperand) else (operand,)
        found = [None if item is None else self.builder.tensor(item) for item in items]
        tensors = tuple(tensor for tensor in found if tensor is not None)
        if len(tensors) != len(items):
            raise self.refuse(f"the input {index + 1} is not a list of tensors")
        return tensors

    def numbers(self, index: int) -> tuple[Number | Ref, ...]:
        """Return the elements of an input that aten takes as numbers: a small tensor, or a list of scalar tensors."""
        operand = self.operand(index)
        items = operand.items if isinstance(operand, ListOperand) else (operand,)
        values: list[Number | Ref] = []
        for item in items:
            if not isinstance(item, NumbersOperand):
                raise self.refuse(f"the input {index + 1} is computed from data")
            values += item.values
        return tuple(values)

    def whole_numbers(self, index: int) -> tuple[int, ...]:
        """Return integers that do not depend on sizes."""
        values = self.numbers(index)
        if not all(type(value) is int for value in values):
            raise self.refuse(f"the input {index + 1} depends on sizes")
        return tuple(value for value in values if type(value) is int)

    def number(self, index: int) -> Number | Ref:
        """Return an input of one element."""
        values = self.numbers(index)
        if len(values) != 1:
            raise self.refuse(f"the input {index + 1} has {len(values)} elements")
        return values[0]

    # Results.

    def kind(self, index: int = 0) -> PirTensor:
        """Return the type of a result."""
        found = self.operator.results[index].type if index < len(self.operator.results) else None
        return self.as_tensor(found)

    def kinds(self) -> tuple[PirTensor, ...]:
        """Return the types of the items of a result that is a list."""
        found = self.operator.results[0].type if self.operator.results else None
        if not isinstance(found, tuple):
            raise self.refuse("its result is not a list")
        return tuple(map(self.as_tensor, found))

    def as_tensor(self, kind: PirType) -> PirTensor:
        if not isinstance(kind, PirTensor):
            raise self.refuse("a result that is not a dense tensor")
        return kind

    def emit(
        self, op: str, *args: Value, kind: PirTensor | None = None, hint: Shape | None = None, **kwargs: Value
    ) -> TensorOperand:
        """Add a node of an aten operator. Its type is that of the first result unless `kind` is given."""
        return self.builder.emit(f"aten.{op}", args, kwargs, kind or self.kind(), hint)

    def several(
        self,
        op: str,
        args: tuple[Value, ...],
        kinds: tuple[PirTensor, ...],
        kwargs: dict[str, Value] | None = None,
        hint: Shape | None = None,
    ) -> tuple[TensorOperand, ...]:
        """Add a node of an aten operator that returns several tensors; return them."""
        made = self.builder.emit_several(f"aten.{op}", args, kinds, kwargs, hint)
        return tuple(item for item in made.items if isinstance(item, TensorOperand))

    def same_dtype(self, *operands: TensorOperand) -> None:
        """Raise Unsupported if dtypes differ: Paddle and torch convert differently."""
        dtypes = {operand.type.dtype for operand in operands} | {self.kind().dtype}
        if len(dtypes) > 1:
            raise self.refuse(f"inputs and result of different dtypes: {', '.join(sorted(dtypes))}")

    def axis(self, axis: int, rank: int) -> int:
        """Return an axis counted from the front."""
        if not -rank <= axis < max(rank, 1):
            raise self.refuse(f"the axis {axis} of {rank} dims")
        return axis + rank if axis < 0 else axis
