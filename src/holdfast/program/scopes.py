"""Checks of a graph as a whole: every name is defined once and before its use, every operator has its arguments."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.errors import Damaged
from holdfast.program import program_limits as most
from holdfast.program.arguments import DeviceValue, DtypeValue, Ref, Value, references
from holdfast.program.graph import AUTOCAST, CONSTANT, ITEM, SET_GRAD, GraphBlock, Node, ProgramData, TensorType
from holdfast.program.operator_table import OWN, SIZE_OPERATIONS

_BLOCK_ARGS = {SET_GRAD: 1, AUTOCAST: 4}  # before the inputs of the block


def check_scopes(program: ProgramData, where: str) -> None:
    """Raise Damaged unless the graph can be run in order: names, arguments, keys, inputs, outputs and mutations."""
    _check_keys(program, where)
    scope = _check_block(program.block, where, program.operators)
    if len(program.inputs) != program.input_structure.leaves:
        raise Damaged(
            f"{where}: {len(program.inputs)} inputs, but their structure has {program.input_structure.leaves}"
        )
    if len(program.outputs) != program.output_structure.leaves:
        raise Damaged(
            f"{where}: {len(program.outputs)} outputs, but their structure has {program.output_structure.leaves}"
        )
    if program.inputs and program.input_structure.kind == "leaf":
        raise Damaged(f"{where}: the inputs are not a tuple of positional ones and a dict of named ones")
    tensors = {entry.name for entry in program.inputs if isinstance(entry.type, TensorType)}
    targets = tensors | {entry.name for entry in program.state}
    for change in program.mutations:
        if change.target not in targets or change.value.name not in scope:
            raise Damaged(f"{where}: a mutation of {change.target!r} by {change.value.name!r}: one of them is unknown")
    for size in program.specialized:
        if size.input not in tensors:
            raise Damaged(f"{where}: a specialized size of {size.input!r}, which is not an input")


def _check_keys(program: ProgramData, where: str) -> None:
    """Raise Damaged if two weights have one key: tied weights are one entry with aliases."""
    for is_constant in (False, True):
        entries = [entry for entry in program.state if (entry.kind == CONSTANT) is is_constant]
        keys = [key for entry in entries for key in (entry.key, *entry.aliases)]
        if len(set(keys)) != len(keys):
            raise Damaged(f"{where}: the key {_twice(keys)!r} belongs to two weights")
        if not is_constant:
            _check_paths(keys, where)


def _check_paths(keys: list[str], where: str) -> None:
    """Raise Damaged if the keys make too many modules, or modules nested too deeply."""
    paths: set[str] = set()
    for key in keys:
        if key.count(".") > most.KEY_DEPTH:
            raise Damaged(f"{where}: the key {key[:80]!r} has more than {most.KEY_DEPTH} modules in each other")
        path = key.rpartition(".")[0]
        while path and path not in paths:
            paths.add(path)
            path = path.rpartition(".")[0]
        if len(paths) > most.MODULES:
            raise Damaged(f"{where}: the keys make more than {most.MODULES} modules")


def _twice(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name[:80]
        seen.add(name)
    return ""


def _check_block(block: GraphBlock, where: str, operators: Iterable[str]) -> set[str]:
    """Check one block; return the names defined in it."""
    if len(set(block.inputs)) != len(block.inputs):
        raise Damaged(f"{where}: the name {_twice(block.inputs)!r} is defined twice")
    known = set(block.inputs)
    for node in block.nodes:
        _check_defined((*node.args, *node.kwargs.values()), known, where, f"the node {node.name!r}")
        if node.name in known:
            raise Damaged(f"{where}: the name {node.name!r} is defined twice")
        if node.op not in OWN and node.op not in operators:
            raise Damaged(f"{where}: the node {node.name!r} calls {node.op}, whose schema is not among the operators")
        _check_own(node, where)
        if node.block is not None:
            _check_block(node.block, where, operators)
        known.add(node.name)
    _check_defined(block.outputs, known, where, "the outputs")
    return known


def _check_defined(values: tuple[Value, ...], known: set[str], where: str, place: str) -> None:
    for name in references(values):
        if name not in known:
            raise Damaged(f"{where}: {place}: {name[:80]!r} is not defined before its use")


def _check_own(node: Node, where: str) -> None:
    """Raise Damaged if an operation that is not aten's has other arguments than it takes."""
    count = len(node.args)
    problem = ""
    if node.op in SIZE_OPERATIONS:
        if count != SIZE_OPERATIONS[node.op]:
            problem = f"{SIZE_OPERATIONS[node.op]} arguments, not {count}"
        elif not all(isinstance(value, Ref | bool | int | float) for value in node.args):
            problem = "numbers"
    elif node.op == ITEM and (count != 2 or not isinstance(node.args[0], Ref) or type(node.args[1]) is not int):
        problem = "a value of several and an integer"
    elif node.block is not None:
        problem = _block_problem(node)
    if problem:
        raise Damaged(f"{where}: the node {node.name!r}: {node.op} takes {problem}")


def _block_problem(node: Node) -> str:
    own = _BLOCK_ARGS[node.op]
    inputs = () if node.block is None else node.block.inputs
    if len(node.args) != own + len(inputs):
        return f"{own} arguments and one for each of {len(inputs)} inputs, not {len(node.args)}"
    if node.op == SET_GRAD:
        return "" if isinstance(node.args[0], bool) else "true or false first"
    device, dtype, enabled, cached = node.args[:4]
    good = isinstance(device, DeviceValue) and isinstance(dtype, DtypeValue | None) and isinstance(enabled, bool)
    return "" if good and isinstance(cached, bool | None) else "a device type, a dtype, whether it is on, and the cache"
