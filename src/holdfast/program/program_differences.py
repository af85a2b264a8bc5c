"""Two programs compared by structure: inputs, weights, sizes, and the operators of each module."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.format import strictjson
from holdfast.program.arguments import Ref, Value, encode_value
from holdfast.program.encode import encode_type
from holdfast.program.graph import Node, ProgramData
from holdfast.program.sizes import size_text
from holdfast.program.structures import encode_structure


@dataclass(frozen=True, slots=True)
class ProgramDifference:
    """One difference: the module or part, what differs, and how it is in each program ("" if it is in one only)."""

    where: str
    what: str
    first: str
    second: str


def compare_programs(first: ProgramData, second: ProgramData) -> Iterator[ProgramDifference]:
    """Yield what differs. Names of nodes and source lines do not count."""
    for name in ("dialect", "training", "group"):
        one, two = getattr(first, name), getattr(second, name)
        if one != two:
            yield ProgramDifference("program", name, str(one), str(two))
    yield from _compare_maps("symbols", dict(_symbols(first)), dict(_symbols(second)))
    yield from _compare_maps("inputs", dict(_inputs(first)), dict(_inputs(second)))
    yield from _compare_maps("weights", dict(_weights(first)), dict(_weights(second)))
    outputs = [strictjson.dumps(encode_structure(one.output_structure)).decode() for one in (first, second)]
    if outputs[0] != outputs[1]:
        yield ProgramDifference("program", "outputs", *outputs)
    guards = [sorted(map(size_text, one.guards)) for one in (first, second)]
    if guards[0] != guards[1]:
        yield ProgramDifference("program", "guards", "; ".join(guards[0]), "; ".join(guards[1]))
    yield from _compare_nodes(first, second)


def _compare_maps(where: str, one: dict[str, str], two: dict[str, str]) -> Iterator[ProgramDifference]:
    for name in dict.fromkeys((*one, *two)):
        if one.get(name) != two.get(name):
            yield ProgramDifference(where, name, one.get(name, ""), two.get(name, ""))


def _symbols(program: ProgramData) -> Iterator[tuple[str, str]]:
    for name, (least, largest) in program.symbols.items():
        yield name, f"{least} to {'any' if largest is None else largest}"


def _inputs(program: ProgramData) -> Iterator[tuple[str, str]]:
    for entry in program.inputs:
        kind = encode_value(entry.value) if entry.type is None else encode_type(entry.type)
        yield entry.name, strictjson.dumps(kind).decode()


def _weights(program: ProgramData) -> Iterator[tuple[str, str]]:
    for entry in program.state:
        tied = f", tied to {', '.join(entry.aliases)}" if entry.aliases else ""
        frozen = ", frozen" if entry.frozen else ""
        yield entry.key, f"{entry.kind} {strictjson.dumps(encode_type(entry.type)).decode()}{tied}{frozen}"


def _compare_nodes(first: ProgramData, second: ProgramData) -> Iterator[ProgramDifference]:
    """Compare the operators of each module in order: what was replaced, added or left out."""
    one, two = (_by_module(program) for program in (first, second))
    for path in dict.fromkeys((*one, *two)):
        before, after = one.get(path, []), two.get(path, [])
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        for kind, begin, end, start, stop in matcher.get_opcodes():
            if kind != "equal":
                what = {"replace": "changed", "insert": "added", "delete": "removed"}[kind]
                yield ProgramDifference(path, what, "; ".join(before[begin:end]), "; ".join(after[start:stop]))


def _by_module(program: ProgramData) -> dict[str, list[str]]:
    keys = {entry.name: entry.key for entry in program.state}
    inputs = {entry.name for entry in program.inputs}
    found: dict[str, list[str]] = {}
    for node in program.walk():
        found.setdefault(node.origin.module, []).append(_signature(node, keys, inputs))
    return found


def _signature(node: Node, keys: dict[str, str], inputs: set[str]) -> str:
    """Return a call without the names of nodes: operator, constants, keys of weights, type of the result."""
    args = [_argument(value, keys, inputs) for value in node.args]
    args += [f"{name}={_argument(value, keys, inputs)}" for name, value in node.kwargs.items()]
    kind = "" if node.type is None else f" -> {strictjson.dumps(encode_type(node.type)).decode()}"
    return f"{node.op}({', '.join(args)}){kind}"


def _argument(value: Value, keys: dict[str, str], inputs: set[str]) -> str:
    if isinstance(value, Ref):
        return keys.get(value.name, value.name if value.name in inputs else "_")
    if isinstance(value, tuple):
        return f"[{', '.join(_argument(item, keys, inputs) for item in value)}]"
    return strictjson.dumps(encode_value(value)).decode()
