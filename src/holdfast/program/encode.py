"""A program as JSON: one node a line, so that people can read it and a diff can compare it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.format import strictjson
from holdfast.program.arguments import encode_value
from holdfast.program.graph import (
    GraphBlock,
    InputEntry,
    Node,
    NodeType,
    Origin,
    ProgramData,
    ScalarType,
    StateEntry,
    TensorType,
)
from holdfast.program.sizes import encode_size
from holdfast.program.structures import encode_structure

FORMAT = "holdfast-program"
VERSION = (1, 1)  # 1.1: frozen parameters


def encode_program(program: ProgramData) -> bytes:
    """Return the program as strict JSON, a line for each node, weight and operator."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "version": list(VERSION),
        "writer": dict(program.writer),
        "dialect": program.dialect,
        "training": program.training,
        "symbols": {name: list(bounds) for name, bounds in program.symbols.items()},
        "guards": [encode_size(guard) for guard in program.guards],
        "specialized": [[size.input, size.dim, size.size] for size in program.specialized],
        "in": encode_structure(program.input_structure),
        "out": encode_structure(program.output_structure),
    }
    if program.group != "model":
        head["group"] = program.group
    if program.mapping:
        head["mapping"] = program.mapping
    lines = [_pair(name, value) for name, value in head.items()]
    lines.append(_many("modules", _members(program.modules), "{}"))
    lines.append(_many("operators", _members(program.operators), "{}"))
    lines.append(_many("inputs", [strictjson.dumps(_input(entry)) for entry in program.inputs], "[]"))
    lines.append(_many("state", [strictjson.dumps(_state(entry)) for entry in program.state], "[]"))
    lines.append(_many("nodes", [strictjson.dumps(_node(node)) for node in program.nodes], "[]"))
    lines.append(_pair("outputs", [encode_value(value) for value in program.outputs]))
    lines.append(_pair("mutations", [[change.target, encode_value(change.value)] for change in program.mutations]))
    return b"{\n" + b",\n".join(lines) + b"\n}\n"


def _pair(name: str, value: Any) -> bytes:
    return strictjson.dumps(name) + b":" + strictjson.dumps(value)


def _members(texts: Any) -> Iterator[bytes]:
    return (_pair(name, text) for name, text in texts.items())


def _many(name: str, lines: Any, brackets: str) -> bytes:
    opening, closing = brackets.encode()[:1], brackets.encode()[1:]
    inside = b",\n".join(lines)
    return strictjson.dumps(name) + b":" + opening + (b"\n" + inside + b"\n" if inside else b"") + closing


def encode_type(kind: NodeType) -> Any:
    """Return the type of a node as JSON data: `[dtype, shape]`, `{"int": size}`, `{"list": [...]}` or null."""
    if kind is None:
        return None
    if isinstance(kind, TensorType):
        return [kind.dtype, [encode_size(size) for size in kind.shape]]
    if isinstance(kind, ScalarType):
        return {kind.kind: None if kind.size is None else encode_size(kind.size)}
    return {"list": [encode_type(item) for item in kind]}


def _input(entry: InputEntry) -> dict[str, Any]:
    if entry.type is None:
        return {"name": entry.name, "value": encode_value(entry.value)}
    return {"name": entry.name, "is": encode_type(entry.type)}


def _state(entry: StateEntry) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "key": entry.key,
        "is": encode_type(entry.type),
    }
    if entry.aliases:
        fields["aliases"] = list(entry.aliases)
    if entry.frozen:
        fields["frozen"] = True
    return fields


def _node(node: Node) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": node.name, "op": node.op, "args": [encode_value(value) for value in node.args]}
    if node.kwargs:
        fields["kwargs"] = {name: encode_value(value) for name, value in node.kwargs.items()}
    if node.block is not None:
        fields["block"] = _block(node.block)
    fields["is"] = encode_type(node.type)
    return fields | _origin(node.origin)


def _origin(origin: Origin) -> dict[str, Any]:
    fields: dict[str, Any] = {"at": origin.module} if origin.module else {}
    if origin.call:
        fields["call"] = origin.call
    if origin.line:
        fields["line"] = origin.line
    if origin.composite is not None:
        fields["of"] = list(origin.composite)
    return fields


def _block(block: GraphBlock) -> dict[str, Any]:
    return {
        "inputs": list(block.inputs),
        "nodes": [_node(node) for node in block.nodes],
        "outputs": [encode_value(value) for value in block.outputs],
    }
