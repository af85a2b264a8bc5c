"""Reads program.json: limits, version, every field, and the order of the graph, before a program exists.

Nothing of the text is evaluated: sizes are trees, operators are compared with the shipped table, and names are only
compared with each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.core.names import is_plain, key_problem
from holdfast.format import strictjson
from holdfast.format.dtypes import dtype_named, is_dtype
from holdfast.format.manifest import Patches, upgrade_fields
from holdfast.program import program_limits as most
from holdfast.program.arguments import Ref, Value, decode_value
from holdfast.program.encode import FORMAT, VERSION
from holdfast.program.graph import (
    BLOCKS,
    DIALECTS,
    PARAMETER,
    STATE_KINDS,
    GraphBlock,
    InputEntry,
    Mutation,
    Node,
    NodeType,
    Origin,
    ProgramData,
    ScalarType,
    SpecializedSize,
    StateEntry,
    TensorType,
)
from holdfast.program.operator_table import OWN, PREFIX, is_allowed
from holdfast.program.schemas import SchemaProblem, parse_schema
from holdfast.program.scopes import check_scopes
from holdfast.program.sizes import Size, decode_size, is_condition, symbols_of
from holdfast.program.structures import decode_structure

# From major version N to N + 1: one function each, tested with the golden programs.
PATCHES: Patches = {}
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r"aten\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+")
_SCALARS = frozenset({"int", "float", "bool"})
_HEAD_FIELDS = frozenset({"format", "version", "writer", "dialect", "training", "symbols", "guards", "specialized"})
_GRAPH_FIELDS = {"in", "out", "modules", "operators", "inputs", "state", "nodes", "outputs", "mutations"}
_FIELDS = _HEAD_FIELDS | _GRAPH_FIELDS | {"group", "mapping"}
_NODE_FIELDS = frozenset({"name", "op", "args", "kwargs", "block", "is", "at", "call", "line", "of"})


def decode_program(data: bytes, where: str) -> ProgramData:
    """Return the program of the bytes of program.json.

    Raises Damaged for what no Holdfast writes, and Unsupported for newer versions and operators outside of the table.
    """
    fields = strictjson.loads(data, where, limit_bytes=most.PROGRAM_BYTES)
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise Damaged(f"{where}: not a Holdfast program")
    fields = upgrade_fields(fields, where, VERSION[0], PATCHES, "program version")
    try:
        program = _FieldReader(where, tuple(fields["version"])).program(fields)
    except (HoldfastError, MemoryError):
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: a field is missing or invalid: {type(error).__name__}: {str(error)[:200]}") from None
    check_scopes(program, where)
    return program


class _FieldReader:
    """Decodes the fields of one program; every problem names the file and the node."""

    def __init__(self, where: str, version: tuple[int, int]) -> None:
        self._where = where
        self._version = version
        self._place = "the program"
        self._nodes = 0
        self._symbols: Mapping[str, tuple[int, int | None]] = {}

    def _problem(self, text: str) -> HoldfastError:
        message = f"{self._where}: {self._place}: {text}"
        if self._version > VERSION:
            written = f"{self._version[0]}.{self._version[1]}"
            return Unsupported(f"{message}; it is a program of version {written}: install a newer Holdfast")
        return Damaged(message)

    def program(self, fields: dict[str, Any]) -> ProgramData:
        unknown = set(fields) - _FIELDS
        if unknown and self._version <= VERSION:
            raise self._problem(f"the unknown field {min(unknown)[:40]!r}")
        if fields["dialect"] not in DIALECTS:
            raise self._problem(f"the unknown dialect {str(fields['dialect'])[:40]!r}")
        if not isinstance(fields["training"], bool):
            raise self._problem("`training` is neither true nor false")
        self._symbols = self._bounds(fields["symbols"])
        return ProgramData(
            inputs=tuple(map(self._input, self._list(fields["inputs"], most.INPUTS))),
            nodes=self._block_nodes(fields["nodes"], 0),
            outputs=self._values(fields["outputs"]),
            state=tuple(map(self._entry, self._list(fields["state"], most.STATE_ENTRIES))),
            input_structure=decode_structure(fields["in"], self._problem),
            output_structure=decode_structure(fields["out"], self._problem),
            operators=self._operators(fields["operators"]),
            symbols=self._symbols,
            guards=tuple(map(self._guard, self._list(fields["guards"], most.GUARDS))),
            mutations=tuple(map(self._mutation, self._list(fields["mutations"], most.STATE_ENTRIES))),
            modules=self._texts(fields["modules"]),
            specialized=tuple(map(self._specialized, self._list(fields["specialized"], most.INPUTS))),
            dialect=fields["dialect"],
            training=fields["training"],
            group=self._group(fields.get("group", "model")),
            mapping=self._long_text(fields.get("mapping", "")),
            writer=self._texts(fields["writer"]),
        )

    def _list(self, data: Any, limit: int) -> list[Any]:
        if not isinstance(data, list) or len(data) > limit:
            raise self._problem(f"not a list of at most {limit}")
        return data

    def _text(self, data: Any) -> str:
        if not isinstance(data, str) or len(data) > most.TEXT_CHARS:
            raise self._problem(f"not a text of at most {most.TEXT_CHARS} characters")
        return data

    def _group(self, data: Any) -> str:
        group = self._text(data)
        if not is_plain(group):
            raise self._problem(f"{group[:80]!r} is not the name of a group")
        return group

    def _long_text(self, data: Any) -> str:
        if not isinstance(data, str):
            raise self._problem("the mapping is not a text")
        return data

    def _texts(self, data: Any) -> dict[str, str]:
        if not isinstance(data, dict):
            raise self._problem("not an object of texts")
        return {self._text(name): self._text(text) for name, text in data.items()}

    def _name(self, data: Any) -> str:
        if not isinstance(data, str) or len(data) > most.NAME_CHARS or not _NAME.fullmatch(data):
            raise self._problem(f"{str(data)[:80]!r} is not a name: letters, digits and _, no digit first")
        return data

    def _bounds(self, data: Any) -> dict[str, tuple[int, int | None]]:
        self._place = "the symbols"
        if not isinstance(data, dict) or len(data) > most.SYMBOLS:
            raise self._problem(f"not an object of at most {most.SYMBOLS}")
        symbols: dict[str, tuple[int, int | None]] = {}
        for name, bounds in data.items():
            least, largest = bounds
            numbers = (least, largest if largest is not None else least)
            if not all(type(number) is int and abs(number) <= most.SIZE_MAX for number in numbers):
                raise self._problem(f"the bounds of {name[:80]!r} are not two numbers")
            symbols[self._name(name)] = (least, largest)
        return symbols

    def _size(self, data: Any) -> Size:
        size = decode_size(data, self._problem)
        for symbol in symbols_of(size):
            if symbol not in self._symbols:
                raise self._problem(f"the unknown symbol {symbol[:80]!r}")
        return size

    def _guard(self, data: Any) -> Size:
        self._place = "the guards"
        guard = self._size(data)
        if not is_condition(guard):
            raise self._problem("a guard that is not a condition")
        return guard

    def _type(self, data: Any, depth: int = 0) -> NodeType:
        if data is None:
            return None
        if isinstance(data, list):
            return self._tensor(data)
        if not isinstance(data, dict) or len(data) != 1 or depth > most.VALUE_DEPTH:
            raise self._problem("an unknown type")
        kind, content = next(iter(data.items()))
        if kind == "list":
            return tuple(self._type(item, depth + 1) for item in self._list(content, most.LIST_ITEMS))
        if kind not in _SCALARS:
            raise self._problem(f"the unknown type {kind[:40]!r}")
        return ScalarType(kind, None if content is None else self._size(content))

    def _tensor(self, data: Any) -> TensorType:
        dtype, shape = data
        if not isinstance(dtype, str) or not is_dtype(dtype):
            raise self._problem(f"the unknown dtype {str(dtype)[:40]!r}")
        sizes = tuple(self._size(size) for size in self._list(shape, 64))
        if any(type(size) is int and size < 0 for size in sizes):
            raise self._problem("a negative size")
        return TensorType(dtype, sizes)

    def _input(self, fields: Any) -> InputEntry:
        self._place = f"the input {str(fields['name'])[:80]!r}"
        self._only(fields, {"name", "is", "value"})
        name = self._name(fields["name"])
        if "is" not in fields:
            value = self._value(fields["value"])
            if not isinstance(value, None | bool | int | float | str):
                raise self._problem("a fixed value that is not a number or a text")
            return InputEntry(name, value=value)
        kind = self._type(fields["is"])
        if "value" in fields or not isinstance(kind, TensorType | ScalarType):
            raise self._problem("not a tensor and not a number")
        return InputEntry(name, kind)

    def _entry(self, fields: Any) -> StateEntry:
        self._place = f"the weight {str(fields['name'])[:80]!r}"
        self._only(fields, {"name", "kind", "key", "is", "aliases", "frozen"})
        kind = self._type(fields["is"])
        if not isinstance(kind, TensorType) or any(type(size) is not int for size in kind.shape):
            raise self._problem("not a tensor of a fixed shape")
        elements = math.prod(max(size, 1) for size in kind.shape if type(size) is int)
        if elements * dtype_named(kind.dtype).bytes > most.SIZE_MAX:
            raise self._problem("a tensor of more bytes than 64 bits can count")
        if fields["kind"] not in STATE_KINDS:
            raise self._problem(f"the unknown kind {str(fields['kind'])[:40]!r}")
        frozen = fields.get("frozen", False)
        if not isinstance(frozen, bool) or (frozen and fields["kind"] != PARAMETER):
            raise self._problem("`frozen` is neither true nor false, or of a weight that is not a parameter")
        aliases = tuple(self._list(fields.get("aliases", []), most.STATE_ENTRIES))
        for key in (fields["key"], *aliases):
            if problem := key_problem(key):
                raise self._problem(f"the key {str(key)[:80]!r} {problem}")
        return StateEntry(self._name(fields["name"]), fields["kind"], fields["key"], kind, aliases, frozen)

    def _only(self, fields: Any, known: set[str] | frozenset[str]) -> None:
        if not isinstance(fields, dict):
            raise self._problem("not an object")
        unknown = set(fields) - known
        if unknown and self._version <= VERSION:
            raise self._problem(f"the unknown field {min(unknown)[:40]!r}")

    def _values(self, data: Any) -> tuple[Value, ...]:
        return tuple(self._value(value) for value in self._list(data, most.LIST_ITEMS))

    def _value(self, data: Any) -> Value:
        return decode_value(data, self._problem)

    def _mutation(self, fields: Any) -> Mutation:
        self._place = "the mutations"
        target, data = fields
        value = self._value(data)
        if not isinstance(value, Ref):
            raise self._problem("a mutation by a value that is not one of a node")
        return Mutation(self._name(target), value)

    def _specialized(self, fields: Any) -> SpecializedSize:
        self._place = "the specialized sizes"
        name, dim, size = fields
        if type(dim) is not int or type(size) is not int or not 0 <= dim < 64 or not 0 <= size <= most.SIZE_MAX:
            raise self._problem("not a name, a dim and a size")
        return SpecializedSize(self._name(name), dim, size)

    def _operators(self, data: Any) -> dict[str, str]:
        self._place = "the operators"
        operators = self._texts(data)
        for op in operators:
            self._check_operator(op)
            if op in OWN:
                raise self._problem(f"{op} has no schema")
            self._check_schema(op, operators[op])
        return operators

    def _check_schema(self, op: str, text: str) -> None:
        try:
            schema = parse_schema(text)
        except SchemaProblem as problem:
            raise self._problem(f"the schema of {op}: {problem}") from None
        if schema.op != op:
            raise self._problem(f"the schema of {op} is that of {schema.op[:80]}")

    def _check_operator(self, op: Any) -> str:
        if not isinstance(op, str):
            raise self._problem("an operator that is not a text")
        if not is_allowed(op):
            kind = "an unknown operation"
            if op.startswith(PREFIX) and _OPERATOR.fullmatch(op):
                kind = "outside of the operators that a program may call"
            raise Unsupported(f"{self._where}: {self._place}: {op[:120]!r} is {kind}")
        return op

    def _block_nodes(self, data: Any, depth: int) -> tuple[Node, ...]:
        self._place = "the nodes"
        self._nodes += len(self._list(data, most.NODES))
        if self._nodes > most.NODES or depth > most.BLOCK_DEPTH:
            raise self._problem(f"more than {most.NODES} nodes, or blocks nested deeper than {most.BLOCK_DEPTH}")
        return tuple(self._node(fields, depth) for fields in data)

    def _node(self, fields: Any, depth: int) -> Node:
        self._place = f"the node {str(fields['name'])[:80]!r}"
        self._only(fields, _NODE_FIELDS)
        op = self._check_operator(fields["op"])
        kwargs = fields.get("kwargs", {})
        if not isinstance(kwargs, dict) or (op in OWN and kwargs):
            raise self._problem("keyword arguments that are not an object, or on an operation without any")
        if (op in BLOCKS) != ("block" in fields):
            raise self._problem(f"{op} {'has no' if op in BLOCKS else 'with a'} block")
        node = Node(
            self._name(fields["name"]),
            op,
            self._values(fields["args"]),
            {self._name(name): self._value(value) for name, value in kwargs.items()},
            self._type(fields["is"]),
            self._origin(fields),
        )
        if "block" not in fields:
            return node
        block = self._block(fields["block"], depth + 1)
        return Node(node.name, op, node.args, node.kwargs, node.type, node.origin, block)

    def _origin(self, fields: dict[str, Any]) -> Origin:
        composite = fields.get("of")
        if composite is not None:
            name, op = composite
            composite = (self._text(name), self._text(op))
        module, call, line = (self._text(fields.get(name, "")) for name in ("at", "call", "line"))
        return Origin(module, call, line, composite)

    def _block(self, fields: Any, depth: int) -> GraphBlock:
        self._only(fields, {"inputs", "nodes", "outputs"})
        inputs = tuple(self._name(name) for name in self._list(fields["inputs"], most.INPUTS))
        nodes = self._block_nodes(fields["nodes"], depth)
        return GraphBlock(inputs, nodes, self._values(fields["outputs"]))
