"""Print a Paddle program: a line for each weight and operator, with types and attributes."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.sources.paddle.pir.pir_program import (
    NO_VALUE,
    Attribute,
    OpaqueAttribute,
    OpaqueType,
    PirOperator,
    PirProgram,
    PirTensor,
    PirType,
)

_QUIET = frozenset({"struct_name", "place", "op_role", "stop_gradient", "persistable"})
_ITEMS = 12  # of a list that are printed


def program_lines(program: PirProgram) -> Iterator[str]:
    """Yield the lines of a program; inner operators of branches and loops are indented."""
    for parameter in program.parameters:
        yield f"%{parameter.id} = {parameter.key}: {type_text(parameter.type)}"
    yield from _operator_lines(program.operators, "")


def _operator_lines(operators: tuple[PirOperator, ...], indent: str) -> Iterator[str]:
    for operator in operators:
        results = ", ".join(f"%{result.id}" for result in operator.results)
        inputs = ", ".join("none" if number == NO_VALUE else f"%{number}" for number in operator.inputs)
        attributes = [
            f"{name}={attribute_text(value)}" for name, value in operator.attributes.items() if name not in _QUIET
        ]
        call = f"{operator.name}({', '.join(filter(None, [inputs, *attributes]))})"
        types = ", ".join(type_text(result.type) for result in operator.results)
        yield indent + (f"{results} = " if results else "") + call + (f": {types}" if types else "")
        yield from _operator_lines(operator.inner, indent + "  ")


def type_text(kind: PirType) -> str:
    """Return a type as text: float32[?, 8] for a tensor whose first size may differ."""
    if isinstance(kind, PirTensor):
        return f"{kind.dtype}[{', '.join('?' if size < 0 else str(size) for size in kind.shape)}]"
    if isinstance(kind, OpaqueType):
        return kind.name
    return "none" if kind is None else f"({', '.join(map(type_text, kind))})"


def attribute_text(value: Attribute) -> str:
    """Return an attribute as text; long lists are shortened."""
    if isinstance(value, tuple):
        more = f", ... {len(value)} in all" if len(value) > _ITEMS else ""
        return f"[{', '.join(map(attribute_text, value[:_ITEMS]))}{more}]"
    if isinstance(value, OpaqueAttribute):
        return f"<{value.kind}>"
    return repr(value)
