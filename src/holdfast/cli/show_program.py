"""`holdfast show --program`: a checkpoint's program by module, an operator's origins, JSON, or an SVG."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.cli.render import clean, count, print_json
from holdfast.core.errors import InvalidArgument, NotFound, StorageError
from holdfast.format import strictjson
from holdfast.program.arguments import encode_value
from holdfast.program.graph import Node, NodeType, ProgramData, ScalarType, TensorType
from holdfast.program.module_counts import ModuleSummary, composites, least_sizes, nodes_of, summarize, total_of
from holdfast.program.sizes import size_text
from holdfast.program.svg import draw

_DEPTH = 3  # parts of a path that a box of the SVG stands for


def show_program(
    checkpoint: Checkpoint, origin: str | None, svg: str | None, sizes: Sequence[str], *, as_json: bool
) -> None:
    """Print the program of a checkpoint, the nodes that call one operator, or write an SVG."""
    program = checkpoint.program
    if program is None:
        raise NotFound(f"{checkpoint.path} has no program; holdfast.add_program(path, program) adds one")
    values = least_sizes(program, _given_sizes(program, sizes))
    modules = summarize(program, values)
    if svg is not None:
        _write(svg, draw(program, modules, _DEPTH))
        click.echo(f"{clean(svg)}: {count(len(modules), 'module')}")
    elif origin is not None:
        _show_origins(program, origin, as_json=as_json)
    elif as_json:
        print_json(_fields(program, modules, values))
    else:
        _print(program, modules, values)


def _given_sizes(program: ProgramData, texts: Sequence[str]) -> dict[str, int]:
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in program.symbols or not number.isdigit():
            known = ", ".join(program.symbols) or "none"
            raise InvalidArgument(
                f"--size {text}: give NAME=NUMBER; the sizes of this program that may differ: {known}"
            )
        found[name] = int(number)
    return found


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}") from error


def _print(program: ProgramData, modules: dict[str, ModuleSummary], values: dict[str, int]) -> None:
    nodes, parameters, flops = total_of(modules, "")
    click.echo(f"{count(nodes, 'operator')}, {parameters:,} parameters, {flops:,} FLOPs{_at(values)}")
    mode = "training" if program.training else "evaluation"
    made = ", ".join(f"{name} {version}" for name, version in program.writer.items())
    click.echo(clean(f"dialect {program.dialect}, exported in {mode} mode by {made}"))
    for entry in program.inputs:
        kind = strictjson.dumps(encode_value(entry.value)).decode() if entry.type is None else type_text(entry.type)
        click.echo(clean(f"input {entry.name}: {kind}"))
    for name, (least, largest) in program.symbols.items():
        click.echo(clean(f"size {name}: {least} to {'any' if largest is None else largest}"))
    for guard in program.guards:
        click.echo(clean(f"only if {size_text(guard)}"))
    for size in program.specialized:
        click.echo(clean(f"dim {size.dim} of {size.input} was declared dynamic and is {size.size}"))
    for path, module in modules.items():
        _print_module(path, module, modules)
    _print_counts(program)


def _at(values: dict[str, int]) -> str:
    return f" at {', '.join(f'{name}={value}' for name, value in values.items())}" if values else ""


def _print_module(path: str, module: ModuleSummary, modules: dict[str, ModuleSummary]) -> None:
    nodes, parameters, flops = total_of(modules, path)
    name = path or "(the model itself)"
    counts = f"{count(nodes, 'operator')}, {parameters:,} parameters, {flops:,} FLOPs in all"
    click.echo()
    click.echo(clean(f"{name}  {module.kind}  {counts}"))
    for node in module.nodes:
        of = f"  <- {node.origin.composite[1]}" if node.origin.composite and node.origin.composite[1] != node.op else ""
        click.echo(clean(f"  {node.name} = {node.op}  {type_text(node.type)}  {node.origin.line}{of}"))


def _print_counts(program: ProgramData) -> None:
    click.echo("\noperators:")
    for op, number in Counter(node.op for node in program.walk()).most_common():
        click.echo(clean(f"  {number:>6}  {op}"))
    became = composites(program)
    if became:
        click.echo("\ncomposites, and what they became:")
    for op, ways in sorted(became.items()):
        for ops, number in ways.most_common():
            click.echo(clean(f"  {number:>6}  {op} -> {', '.join(ops)}"))


def _show_origins(program: ProgramData, op: str, *, as_json: bool) -> None:
    """Print the way back from an operator: module, source line and composite of every call."""
    found = nodes_of(program, op)
    if not found:
        known = sorted({node.op for node in program.walk()})
        raise NotFound(f"no node calls {op!r}; the operators of this program: {', '.join(known)}")
    if as_json:
        print_json([_node_fields(node) for node in found])
        return
    for node in found:
        of = "" if node.origin.composite is None else f"  of {node.origin.composite[1]} ({node.origin.composite[0]})"
        place = node.origin.module or "(the model itself)"
        click.echo(clean(f"{node.name}: {place}  {node.origin.call}  {node.origin.line}{of}"))


def _node_fields(node: Node) -> dict[str, Any]:
    composite = node.origin.composite
    return {
        "name": node.name,
        "op": node.op,
        "module": node.origin.module,
        "call": node.origin.call,
        "line": node.origin.line,
        "composite": None if composite is None else {"name": composite[0], "op": composite[1]},
    }


def _fields(program: ProgramData, modules: dict[str, ModuleSummary], values: dict[str, int]) -> dict[str, Any]:
    nodes, parameters, flops = total_of(modules, "")
    return {
        "dialect": program.dialect,
        "training": program.training,
        "writer": dict(program.writer),
        "sizes": values,
        "nodes": nodes,
        "parameters": parameters,
        "flops": flops,
        "operators": dict(Counter(node.op for node in program.walk()).most_common()),
        "modules": {
            path: {
                "class": module.kind,
                "operators": dict(module.operators),
                "parameters": module.parameters,
                "flops": module.flops,
            }
            for path, module in modules.items()
        },
        "composites": {
            op: [{"became": list(ops), "count": number} for ops, number in ways.most_common()]
            for op, ways in sorted(composites(program).items())
        },
    }


def type_text(kind: NodeType) -> str:
    """Return a type as people write it."""
    if isinstance(kind, TensorType):
        return f"{kind.dtype}[{', '.join(map(size_text, kind.shape))}]"
    if isinstance(kind, ScalarType):
        return kind.kind if kind.size is None else f"{kind.kind} {size_text(kind.size)}"
    return "" if kind is None else f"({', '.join(map(type_text, kind))})"
