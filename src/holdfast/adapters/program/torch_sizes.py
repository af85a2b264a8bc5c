"""Sizes of torch's graphs as trees: the expressions behind SymInts, and the guards of an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.core.errors import Unsupported
from holdfast.program.sizes import Size, SizeOperation

# Classes of sympy and of torch's own functions, by name: nothing of sympy is imported.
_NAMES = {
    "Add": "add",
    "Mul": "mul",
    "Pow": "pow",
    "PowByNatural": "pow",
    "FloorDiv": "floordiv",
    "CleanDiv": "floordiv",
    "Mod": "mod",
    "PythonMod": "mod",
    "Min": "min",
    "Max": "max",
    "Equality": "eq",
    "Unequality": "ne",
    "StrictLessThan": "lt",
    "LessThan": "le",
    "StrictGreaterThan": "gt",
    "GreaterThan": "ge",
    "And": "and",
    "Or": "or",
    "Not": "not",
    "Where": "where",
}


class SizeNames:
    """The names of the symbols of one export: those of the user's Dims where there are any."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._taken: set[str] = set()

    def prefer(self, symbol: Any, name: str) -> None:
        """Call a symbol by the name of the user's Dim, unless another symbol has that name."""
        if str(symbol) not in self._names and name not in self._taken and name.isidentifier():
            self._names[str(symbol)] = name
            self._taken.add(name)

    def of(self, symbol: str) -> str:
        if symbol not in self._names:
            name = symbol
            while name in self._taken:
                name += "_"
            self._names[symbol] = name
            self._taken.add(name)
        return self._names[symbol]

    @property
    def known(self) -> Mapping[str, str]:
        """torch's symbol by the name here."""
        return {name: symbol for symbol, name in self._names.items()}

    def size(self, value: Any) -> Size:
        """Return an int or SymInt as a tree; raises Unsupported if the grammar of sizes cannot say it."""
        return value if isinstance(value, int) else self.tree(value.node.expr)

    def tree(self, expression: Any) -> Size:
        """Return a sympy expression as a tree."""
        if (
            expression is True
            or expression is False
            or (getattr(expression, "is_Boolean", False) and not expression.args)
        ):
            return int(bool(expression))
        if getattr(expression, "is_Symbol", False):
            return self.of(str(expression))
        if getattr(expression, "is_Integer", False):
            return int(expression)
        kind, args = type(expression).__name__, expression.args
        if kind in ("Identity", "ToFloat") and len(args) == 1:
            return self.tree(args[0])
        if kind == "CeilDiv":
            top, bottom = (self.tree(argument) for argument in args)
            negative = SizeOperation("mul", (-1, top))
            return SizeOperation("mul", (-1, SizeOperation("floordiv", (negative, bottom))))
        if kind not in _NAMES or (kind == "Pow" and not args[1].is_Integer):
            raise Unsupported(
                f"the size {str(expression)[:200]} cannot be written: {kind} is not in the grammar of sizes"
            )
        return SizeOperation(_NAMES[kind], tuple(self.tree(argument) for argument in args))


def shape_env_of(graph: torch.fx.Graph) -> Any:
    """Return torch's record of symbols and guards of an exported graph; None if every size is constant."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for symbolic in _symbolic(value):
            return symbolic.node.shape_env
    return None


def _symbolic(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield from (size for size in value.shape if isinstance(size, torch.SymInt))
    elif isinstance(value, torch.SymInt):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _symbolic(item)


def guards_of(shape_env: Any, names: SizeNames) -> tuple[Size, ...]:
    """Return the conditions on sizes under which the graph was made; raises Unsupported for one that cannot be said."""
    bound = {symbol for symbol, sources in shape_env.var_to_sources.items() if any(map(_from_inputs, sources))}
    found: dict[str, Size] = {}
    for guard in shape_env.guards:
        expression = shape_env.replace(guard.expr)
        if expression.free_symbols and expression.free_symbols <= bound:
            found[str(expression)] = names.tree(expression)
    return tuple(found.values())


def _from_inputs(source: Any) -> bool:
    return type(source).__name__ != "ConstantSource"


def bounds_of(interval: Any) -> tuple[int, int | None]:
    """Return the least and largest value of a range; None where there is no largest one."""
    least, largest = interval.lower, interval.upper
    return (int(least) if least.is_Integer else 0, int(largest) if largest.is_Integer else None)
