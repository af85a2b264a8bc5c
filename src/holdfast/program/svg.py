"""The graph of a program as an SVG, folded by module: a box for each, arrows where values pass between them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from holdfast.program.arguments import references
from holdfast.program.graph import ProgramData
from holdfast.program.module_counts import ModuleSummary, total_of

_WIDTH, _HEIGHT, _GAP, _LEFT = 460, 44, 26, 90


def draw(program: ProgramData, modules: Mapping[str, ModuleSummary], depth: int) -> str:
    """Return the graph with a box for each module of at most `depth` parts of its path."""
    order: dict[str, int] = {}
    for node in program.nodes:
        order.setdefault(_folded(node.origin.module, depth), len(order))
    boxes = list(order)
    rows = {path: 20 + index * (_HEIGHT + _GAP) for index, path in enumerate(boxes)}
    parts = [
        _arrow(rows[source], rows[target], order[target] - order[source]) for source, target in _edges(program, depth)
    ]
    parts += [_box(path, program.modules.get(path, ""), modules, rows[path]) for path in boxes]
    height = 20 + len(boxes) * (_HEIGHT + _GAP)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 2 * _LEFT}" height="{height}" '
        'font-family="monospace" font-size="12"><defs><marker id="end" markerWidth="8" markerHeight="8" refX="7" '
        'refY="4" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker></defs>'
    )
    return head + "".join(parts) + "</svg>\n"


def _folded(path: str, depth: int) -> str:
    return ".".join(path.split(".")[:depth]) if path else ""


def _edges(program: ProgramData, depth: int) -> list[tuple[str, str]]:
    """Return the pairs of folded modules between which values pass, each once."""
    owner = {node.name: _folded(node.origin.module, depth) for node in program.nodes}
    found: dict[tuple[str, str], None] = {}
    for node in program.nodes:
        for name in references((*node.args, *node.kwargs.values())):
            if name in owner and owner[name] != owner[node.name]:
                found[owner[name], owner[node.name]] = None
    return list(found)


def _box(path: str, kind: str, modules: Mapping[str, ModuleSummary], top: int) -> str:
    nodes, parameters, flops = total_of(modules, path) if path else _own(modules)
    title = escape(f"{path or '(the model itself)'}  {kind.rpartition('.')[2]}"[:64])
    text = escape(f"{nodes} operators, {parameters:,} parameters, {flops:,} FLOPs")
    return (
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="5" fill="#e8f3f1" stroke="#2a7f73"/>'
        f'<text x="{_LEFT + 10}" y="{top + 18}" font-weight="bold">{title}</text>'
        f'<text x="{_LEFT + 10}" y="{top + 35}">{text}</text>'
    )


def _own(modules: Mapping[str, ModuleSummary]) -> tuple[int, int, int]:
    root = modules.get("")
    return (0, 0, 0) if root is None else (len(root.nodes), root.parameters, root.flops)


def _arrow(begin: int, end: int, steps: int) -> str:
    """Return a straight arrow to the next box, else a curve: on the right side forward, on the left side back."""
    if steps == 1:
        middle = _LEFT + _WIDTH // 2
        return (
            f'<path d="M{middle},{begin + _HEIGHT} L{middle},{end}" stroke="#555" fill="none" marker-end="url(#end)"/>'
        )
    side, bend = (_LEFT + _WIDTH, min(80, 20 + 6 * steps)) if steps > 0 else (_LEFT, -min(80, 20 - 6 * steps))
    first, last = begin + _HEIGHT // 2, end + _HEIGHT // 2
    curve = f"M{side},{first} C{side + bend},{first} {side + bend},{last} {side},{last}"
    return f'<path d="{curve}" stroke="#999" fill="none" marker-end="url(#end)"/>'
