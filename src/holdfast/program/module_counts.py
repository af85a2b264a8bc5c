"""Counts of a program by module: operators, parameters, floating-point operations; what composites became."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.program.arguments import Ref, Value
from holdfast.program.graph import CONSTANT, Node, NodeType, ProgramData, TensorType
from holdfast.program.operator_table import OWN
from holdfast.program.sizes import Size, SizeProblem, evaluate

Shape = tuple[int, ...]


@dataclass(slots=True)
class ModuleSummary:
    """One module of a program: its own nodes, and its own parameters. `flops` is None if a size is unknown."""

    path: str
    kind: str
    nodes: list[Node] = field(default_factory=list)
    parameters: int = 0
    flops: int = 0

    @property
    def operators(self) -> Counter[str]:
        return Counter(node.op for node in self.nodes)


def least_sizes(program: ProgramData, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return a value for every symbol: a given one, or the least size that is allowed, at least 1."""
    return {name: max(1, least) for name, (least, _) in program.symbols.items()} | dict(given or {})


def summarize(program: ProgramData, sizes: Mapping[str, int]) -> dict[str, ModuleSummary]:
    """Return the modules of a program by path, in the order of their first node."""
    types = types_of(program)
    found: dict[str, ModuleSummary] = {}
    for node in program.walk():
        path = node.origin.module
        module = found.setdefault(path, ModuleSummary(path, program.modules.get(path, "")))
        module.nodes.append(node)
        module.flops += node_flops(node, types, sizes)
    for entry in program.state:
        if entry.kind != CONSTANT:
            path = entry.key.rpartition(".")[0]
            module = found.setdefault(path, ModuleSummary(path, program.modules.get(path, "")))
            module.parameters += math.prod(size for size in entry.type.shape if isinstance(size, int))
    return found


def total_of(modules: Mapping[str, ModuleSummary], path: str) -> tuple[int, int, int]:
    """Return the nodes, parameters and FLOPs of a module and of all modules inside of it."""
    inside = [one for key, one in modules.items() if not path or key == path or key.startswith(f"{path}.")]
    return (
        sum(len(one.nodes) for one in inside),
        sum(one.parameters for one in inside),
        sum(one.flops for one in inside),
    )


def composites(program: ProgramData) -> dict[str, Counter[tuple[str, ...]]]:
    """Return what each composite operator became: by operator, the operators in order, and how often."""
    calls: dict[tuple[str, str], list[str]] = {}
    for node in program.walk():
        if node.origin.composite is not None:
            calls.setdefault(node.origin.composite, []).append(node.op)
    found: dict[str, Counter[tuple[str, ...]]] = {}
    for (_, op), became in calls.items():
        found.setdefault(op, Counter())[tuple(became)] += 1
    return found


def nodes_of(program: ProgramData, op: str) -> list[Node]:
    """Return the nodes that call an operator; "aten.addmm" stands for all of its overloads."""
    return [node for node in program.walk() if node.op == op or node.op.startswith(f"{op}.")]


def types_of(program: ProgramData) -> dict[str, NodeType]:
    """Return the types of all values by name. Names of blocks do not hide those outside with another type."""
    types: dict[str, NodeType] = {entry.name: entry.type for entry in program.state}
    types |= {entry.name: entry.type for entry in program.inputs}
    for node in program.walk():
        types[node.name] = node.type
        if node.block is not None:
            types |= dict(_block_inputs(node, types))
    return types


def _block_inputs(node: Node, types: Mapping[str, NodeType]) -> Iterator[tuple[str, NodeType]]:
    assert node.block is not None
    given = node.args[len(node.args) - len(node.block.inputs) :]
    for name, value in zip(node.block.inputs, given, strict=True):
        if isinstance(value, Ref):
            yield name, types.get(value.name)


def node_flops(node: Node, types: Mapping[str, NodeType], sizes: Mapping[str, int]) -> int:
    """Return the floating-point operations of a product, a convolution or an attention; 0 for other operators."""
    if node.op in OWN:
        return 0
    name = node.op.split(".")[1]
    shapes = [_shape(value, types, sizes) for value in node.args]
    made = _sizes(node.type[0] if isinstance(node.type, tuple) and node.type else node.type, sizes)
    if made is None:
        return 0
    if name in ("linear", "mm", "bmm", "matmul"):
        return _product(made, shapes, 0)
    if name in ("addmm", "baddbmm"):
        return _product(made, shapes, 1)
    if name.startswith("conv") and len(shapes) > 1 and shapes[0] and shapes[1]:
        transposed = "transpose" in name or (name == "convolution" and len(node.args) > 6 and node.args[6] is True)
        rows = shapes[0] if transposed else made
        return 2 * math.prod(rows) * math.prod(shapes[1][1:])
    if "scaled_dot_product" in name and len(shapes) > 2 and shapes[0] and shapes[1]:
        return 4 * math.prod(shapes[0]) * shapes[1][-2]
    return 0


def _product(made: Shape, shapes: list[Shape | None], first: int) -> int:
    left = shapes[first] if len(shapes) > first else None
    return 2 * math.prod(made) * left[-1] if left else 0


def _shape(value: Value, types: Mapping[str, NodeType], sizes: Mapping[str, int]) -> Shape | None:
    return _sizes(types.get(value.name), sizes) if isinstance(value, Ref) else None


def _sizes(kind: NodeType, sizes: Mapping[str, int]) -> Shape | None:
    if not isinstance(kind, TensorType):
        return None
    try:
        return tuple(_positive(size, sizes) for size in kind.shape)
    except SizeProblem:
        return None


def _positive(size: Size, sizes: Mapping[str, int]) -> int:
    return max(0, evaluate(size, sizes))
