"""The operators of a program held against the running torch: schemas, and the arguments of every call."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.adapters.program.torch_operators import is_backward_compatible, overload_named, schema_of
from holdfast.core.errors import Damaged, Unsupported
from holdfast.program.graph import CORE, ProgramData
from holdfast.program.operator_table import OWN
from holdfast.program.schemas import SchemaProblem, parse_schema

_VIEW = "aten.view.default"


def checked_operators(program: ProgramData, where: str) -> dict[str, Any]:
    """Return the overloads of a program by name; nothing is looked up that is not in the table.

    Raises Unsupported for an operator whose schema changed in a way that torch does not call compatible, with both
    schemas, and Damaged for arguments that an operator does not take.
    """
    found = {}
    for op, stored in program.operators.items():
        overload = overload_named(op)
        running = schema_of(overload)
        if str(running) != stored and not is_backward_compatible(running, stored):
            raise Unsupported(
                f"{where}: {op} has another schema in torch {torch.__version__} than in the one that wrote the program "
                f"({program.writer.get('torch', 'unknown')}): export the model again, or use that torch\n"
                f"  the program: {stored}\n  this torch:  {running}"
            )
        found[op] = overload
    schemas = {op: parse_schema(str(schema_of(overload))) for op, overload in found.items()}
    for node in program.walk():
        if node.op not in OWN:
            try:
                schemas[node.op].check(node.args, dict(node.kwargs))
            except SchemaProblem as problem:
                raise Damaged(f"{where}: the node {node.name!r}: {node.op} {problem}") from None
    if program.dialect == CORE and _VIEW in found:
        # torch decomposes by the strides of the export, which may differ in a run; without aliases both mean the same.
        found[_VIEW] = torch.ops.aten.reshape.default
    return found
