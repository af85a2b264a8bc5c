"""Translate a Paddle program into a Holdfast program: one rule for each operator, nodes of aten operators.

Values that Paddle passes as small tensors and aten as numbers (shapes, axes, bounds) are followed as numbers. Sizes
that may differ between calls become nodes of the program that read them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np

from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.format.dtypes import is_dtype
from holdfast.program.arguments import Ref, Value
from holdfast.program.graph import (
    BUFFER,
    CONSTANT,
    ITEM,
    PARAMETER,
    InputEntry,
    Node,
    NodeType,
    Origin,
    ScalarType,
    StateEntry,
    TensorType,
)
from holdfast.program.model_program import Program
from holdfast.program.sizes import Size
from holdfast.program.structures import Structure
from holdfast.sources.paddle.pir.pir_call import PirCall, made_like
from holdfast.sources.paddle.pir.pir_operands import (
    AbsentOperand,
    ListOperand,
    Number,
    NumbersOperand,
    Operand,
    Shape,
    TensorOperand,
    known_shape,
)
from holdfast.sources.paddle.pir.pir_program import NO_VALUE, UNKNOWN, PirOperator, PirProgram, PirTensor, PirType
from holdfast.sources.paddle.pir.pir_rules import RULES
from holdfast.sources.paddle.pir.pir_schemas import schema_of
from holdfast.version import __version__

DATA, FETCH = "pd_op.data", "pd_op.fetch"
_NUMBERED = re.compile(r"_[0-9]+$")
_SHOWN = 20


def untranslatable(program: PirProgram) -> tuple[str, ...]:
    """Return the names of the operators that have no counterpart, in the order of the program."""
    known = {*RULES, DATA, FETCH}
    found = (operator.name for operator in program.walk() if operator.name not in known or operator.regions)
    return tuple(dict.fromkeys(found))


def translate(program: PirProgram, where: str) -> Program:
    """Return the Holdfast program that computes the same.

    Raises Unsupported with the names of operators that have no counterpart, or of one that is used in a way that has
    none.
    """
    missing = untranslatable(program)
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise Unsupported(
            f"{where}: no aten counterpart is known for {', '.join(missing[:_SHOWN])}{more}: the program can be looked "
            "at and its weights read, but not run"
        )
    return Translation(program, where).result()


class Translation:
    """The new program as far as it is made, and its values by the numbers of the old one."""

    def __init__(self, program: PirProgram, where: str) -> None:
        self._program = program
        self._where = where
        self._taken: Counter[str] = Counter()
        self._names: set[str] = set()
        self._values: dict[int, Operand] = {}
        self._state: list[StateEntry] = []
        self._inputs: list[InputEntry] = []
        self._nodes: list[Node] = []
        self._outputs: dict[int, Value] = {}
        self._symbols: dict[str, tuple[int, int | None]] = {}
        self._operators: dict[str, str] = {}
        self._modules: dict[str, str] = {"": ""}
        self._constants: dict[str, Any] = {}
        self._sizes: dict[Any, Ref] = {}
        self._size_names: dict[str, Size | None] = {}
        self._materialized: dict[str, TensorOperand] = {}
        self._shared: dict[int, list[int]] = {}  # numbers of one tensor that operators changed in place
        self._origin = Origin()

    def result(self) -> Program:
        """Return the program, checked as one that is read from a file."""
        for parameter in self._program.parameters:
            self._add_parameter(parameter.key, parameter.id, parameter.type, parameter.trainable)
        for operator in self._program.operators:
            if operator.name == DATA:
                self._add_input(operator)
        for operator in self._program.operators:
            if operator.name == FETCH:
                self._add_output(operator)
            elif operator.name != DATA:
                self._add(operator)
        outputs = tuple(self._outputs[column] for column in sorted(self._outputs))
        leaf = Structure()
        positional = Structure("tuple", (leaf,) * len(self._inputs))
        return Program(
            inputs=tuple(self._inputs),
            input_structure=Structure("tuple", (positional, Structure("dict"))),
            state=tuple(self._state),
            nodes=tuple(self._nodes),
            outputs=outputs,
            output_structure=leaf if len(outputs) == 1 else Structure("tuple", (leaf,) * len(outputs)),
            operators=self._operators,
            symbols=self._symbols,
            modules=self._modules,
            training=False,
            writer={"holdfast": __version__, "paddle_pir": str(self._program.version)},
            constants=self._constants,
        ).check(self._where)

    # The values of the old program.

    def operand(self, number: int) -> Operand | None:
        """Return a value by its number; None for an optional one that is not given."""
        if number == NO_VALUE:
            return None
        found = self._values.get(number)
        if found is None:
            raise Unsupported(f"{self._where}: the value %{number} is of a kind that has no counterpart")
        if isinstance(found, AbsentOperand):
            raise Unsupported(
                f"{self._where}: {found.name}: its result {found.index + 1} is used: it has no counterpart"
            )
        return found

    def rebind(self, number: int, result: int, operand: Operand) -> None:
        """Replace a value that an operator changed in place, and earlier names of it, for all later users."""
        shared = self._shared.setdefault(number, [number])
        for other in shared:
            self._values[other] = operand
        shared.append(result)
        self._shared[result] = shared

    def tensor(self, operand: Operand) -> TensorOperand | None:
        """Return an operand as a tensor; numbers become one."""
        if isinstance(operand, NumbersOperand):
            key = repr(operand)  # two zeros of different signs are equal
            if key not in self._materialized:
                self._materialized[key] = self._tensor_of_numbers(operand)
            return self._materialized[key]
        return operand if isinstance(operand, TensorOperand) else None

    def _tensor_of_numbers(self, operand: NumbersOperand) -> TensorOperand:
        dtype, shape = operand.type.dtype, operand.type.shape
        numbers = [value for value in operand.values if not isinstance(value, Ref)]
        if len(numbers) == len(operand.values) and numbers and len(set(map(repr, numbers))) == 1:
            return self.emit("aten.full.default", (shape, numbers[0]), made_like(dtype), operand.type)
        if len(numbers) == len(operand.values) and len(numbers) > 1 and dtype != "bfloat16":
            return self.constant(np.array(numbers, dtype).reshape(shape), operand.type)
        if not shape:
            return self.emit("aten.scalar_tensor.default", (operand.values[0],), made_like(dtype), operand.type)
        parts = tuple(
            self._tensor_of_numbers(NumbersOperand((value,), PirTensor(dtype, ()))).ref for value in operand.values
        )
        return self.emit("aten.stack.default", (parts, 0), {}, operand.type)

    def constant(self, array: Any, kind: PirTensor) -> TensorOperand:
        """Return a tensor that belongs to the program and is no weight."""
        name = self._new_name("constant")
        self._constants[name] = array
        self._state.append(StateEntry(name, CONSTANT, name, TensorType(kind.dtype, tuple(array.shape))))
        return TensorOperand(Ref(name), kind, known_shape(kind))

    # The new program.

    def emit(
        self,
        op: str,
        args: tuple[Value, ...],
        kwargs: dict[str, Value] | None = None,
        kind: PirTensor | None = None,
        hint: Shape | None = None,
    ) -> TensorOperand:
        """Add a node; return its value. `hint` has the sizes of dims that the type leaves open."""
        self._operators[op] = schema_of(op)
        kind = kind or PirTensor("float32", ())
        shape = known_shape(kind, hint)
        ref = self._add_node(op, args, kwargs or {}, _node_type(kind, shape))
        return TensorOperand(ref, kind, shape)

    def emit_several(
        self,
        op: str,
        args: tuple[Value, ...],
        kinds: tuple[PirTensor, ...],
        kwargs: dict[str, Value] | None = None,
        hint: Shape | None = None,
    ) -> ListOperand:
        """Add a node that returns several tensors, and one for each of them."""
        self._operators[op] = schema_of(op)
        shapes = [known_shape(kind, hint) for kind in kinds]
        types = tuple(_node_type(kind, shape) for kind, shape in zip(kinds, shapes, strict=True))
        whole = self._add_node(op, args, kwargs or {}, types)
        parts = [self._add_node(ITEM, (whole, index), {}, kind) for index, kind in enumerate(types)]
        made = zip(parts, kinds, shapes, strict=True)
        return ListOperand(tuple(TensorOperand(ref, kind, shape) for ref, kind, shape in made))

    def size(self, operand: TensorOperand, dim: int) -> int | Ref:
        """Return the size of a dim: a number if it is known, otherwise a node that reads it."""
        size = operand.type.shape[dim]
        if size != UNKNOWN:
            return size
        symbol = operand.shape[dim]
        place = symbol if isinstance(symbol, str) else (operand.ref.name, dim)
        if place not in self._sizes:
            op = "aten.sym_size.int"
            self._operators[op] = schema_of(op)
            ref = self._add_node(op, (operand.ref, dim), {}, ScalarType("int", symbol))
            self._sizes[place] = ref
            self._size_names[ref.name] = symbol
        return self._sizes[place]

    def compute_size(self, op: str, *terms: Number | Ref) -> Ref:
        """Add a node that computes with sizes."""
        return self._add_node(f"size.{op}", terms, {}, ScalarType("int"))

    def size_name(self, size: Number | Ref) -> Size | None:
        """Return a size as part of a type: a number, a symbol, or None."""
        if isinstance(size, Ref):
            return self._size_names.get(size.name)
        return size if type(size) is int and size >= 0 else None

    def _add_node(self, op: str, args: tuple[Value, ...], kwargs: dict[str, Value], kind: NodeType) -> Ref:
        name = self._new_name(op.split(".")[1])
        self._nodes.append(Node(name, op, args, kwargs, kind, self._origin))
        return Ref(name)

    def _new_name(self, wanted: str) -> str:
        base = re.sub(r"[^A-Za-z0-9_]", "_", wanted)[:200] or "value"
        base = f"_{base}" if base[0].isdigit() else base
        name = base
        while name in self._names:
            self._taken[base] += 1
            name = f"{base}_{self._taken[base]}"
        self._names.add(name)
        return name

    # The operators of the old program.

    def _add_parameter(self, key: str, number: int, kind: PirType, trainable: bool) -> None:
        if not isinstance(kind, PirTensor) or UNKNOWN in kind.shape or not is_dtype(kind.dtype):
            raise Unsupported(f"{self._where}: the parameter {key!r} is not a dense tensor of a fixed shape")
        name = self._new_name(key)
        tensor = TensorType(kind.dtype, kind.shape)
        self._state.append(StateEntry(name, PARAMETER if trainable else BUFFER, key, tensor))
        self._values[number] = TensorOperand(Ref(name), kind, kind.shape)

    def _add_input(self, operator: PirOperator) -> None:
        kind = operator.results[0].type if operator.results else None
        wanted = operator.attributes.get("name")
        if not isinstance(kind, PirTensor) or not isinstance(wanted, str):
            raise Unsupported(f"{self._where}: {DATA}: an input that is not a dense tensor")
        name = self._new_name(wanted)
        shape: list[Size] = []
        for dim, size in enumerate(kind.shape):
            if size == UNKNOWN:
                symbol = self._new_name(f"{name}_{dim}")
                self._symbols[symbol] = (0, None)
                shape.append(symbol)
            else:
                shape.append(size)
        self._inputs.append(InputEntry(name, TensorType(kind.dtype, tuple(shape))))
        self._values[operator.results[0].id] = TensorOperand(Ref(name), kind, tuple(shape))

    def _add_output(self, operator: PirOperator) -> None:
        column = operator.attributes.get("col")
        operand = self.operand(operator.inputs[0]) if len(operator.inputs) == 1 else None
        tensor = None if operand is None else self.tensor(operand)
        if type(column) is not int or column in self._outputs or tensor is None:
            raise Unsupported(f"{self._where}: {FETCH}: an output that is not one tensor in a place of its own")
        self._outputs[column] = tensor.ref

    def _add(self, operator: PirOperator) -> None:
        self._origin = self._origin_of(operator)
        call = PirCall(self, operator, self._where)
        try:
            made = RULES[operator.name](call)
        except HoldfastError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise call.refuse(f"inputs that the operator does not take ({type(error).__name__})") from None
        call.check_attributes()
        found = made if isinstance(made, tuple) else (made,)
        for index, result in enumerate(operator.results):
            self._values[result.id] = found[index] if index < len(found) else AbsentOperand(operator.name, index)

    def _origin_of(self, operator: PirOperator) -> Origin:
        scope = operator.attributes.get("struct_name", "")
        path = ".".join(part for part in str(scope).split("/") if part)[:1000]
        parts = path.split(".") if path else []
        for count in range(1, len(parts) + 1):
            self._modules.setdefault(".".join(parts[:count]), _NUMBERED.sub("", parts[count - 1]))
        number = operator.results[0].id if operator.results else NO_VALUE
        return Origin(path, operator.name, "", (f"%{number}", operator.name))


def _node_type(kind: PirTensor, shape: Shape) -> TensorType | None:
    sizes = tuple(size for size in shape if size is not None)
    return TensorType(kind.dtype, sizes) if len(sizes) == len(shape) else None
