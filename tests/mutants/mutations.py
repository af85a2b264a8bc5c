"""The mutations of a file: each replaces a piece of its text by another."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.BitOr: "&", ast.BitAnd: "|",
}  # fmt: skip
DROPPED = ast.Expr | ast.Raise | ast.AugAssign | ast.Delete | ast.Continue | ast.Break
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file: the bytes from `begin` to `end` become `after`."""

    file: str
    scope: str
    kind: str
    line: int
    begin: int
    end: int
    before: str
    after: str

    def apply(self, source: bytes) -> bytes:
        """Return the changed source."""
        return source[: self.begin] + self.after.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """Return the change as a diff of the lines around it."""
        old, new = source.decode().splitlines(), self.apply(source).decode().splitlines()
        lines = difflib.unified_diff(old, new, self.file, f"{self.file}: {self.kind} in {self.scope}", lineterm="", n=1)
        return "\n".join(lines)


def mutations(file: str, source: bytes) -> list[Mutation]:
    """Return every mutation of a file that compiles, in the order of the text."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for scope, kind, node, after in _walk(ast.parse(source), ""):
        assert node.end_lineno is not None and node.end_col_offset is not None
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        before = source[begin:end].decode()
        made = Mutation(file, scope or "the module", kind, node.lineno, begin, end, before, after)
        if before != after and _compiles(made.apply(source)):
            found.append(made)
    return sorted(found, key=lambda each: (each.begin, each.end, each.kind, each.after))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


Found = tuple[str, str, ast.expr | ast.stmt, str]


def _walk(node: ast.AST, scope: str) -> Iterator[Found]:
    """Yield the scope, the kind, the node and its new text; annotations, decorators and messages are left alone."""
    if isinstance(node, Scope):
        scope = f"{scope}.{node.name}".lstrip(".")
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or _is_left_alone(child, scope):
                continue
            if isinstance(child, ast.expr | ast.stmt):
                yield from ((scope, kind, child, after) for kind, after in _changes(child, scope))
                if field in ("test", "ifs") and isinstance(child, ast.Name | ast.Attribute | ast.Call | ast.BoolOp):
                    yield scope, "negation", child, f"(not ({_text(child)}))"
            if not isinstance(child, ast.Raise | ast.JoinedStr | ast.Assert):
                yield from _walk(child, scope)


def _is_left_alone(node: ast.AST, scope: str) -> bool:
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True  # a docstring
    return not scope and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("__")


def _changes(node: ast.expr | ast.stmt, scope: str) -> Iterator[tuple[str, str]]:
    match node:
        case ast.Compare(ops=[only]) if type(only) in COMPARISONS:
            right = _text(node.comparators[0])
            yield "comparison", f"{_text(node.left)} {COMPARISONS[type(only)]} {right}"
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _has_text(node):
            yield "arithmetic", f"{_text(node.left)} {ARITHMETIC[type(node.op)]} {_text(node.right)}"
        case ast.BoolOp():
            other = " or " if isinstance(node.op, ast.And) else " and "
            yield "boolean", other.join(f"({_text(value)})" for value in node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", f"({_text(node.operand)})"
        case ast.Constant(value=bool()):
            yield "constant", str(not node.value)
        case ast.Constant(value=int()):
            yield "off by one", str(node.value + 1)
        case ast.Constant(value=str()) if node.value.isidentifier() and scope:
            yield "constant", repr(str(node.value) + "x")
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred | ast.GeneratorExp):
            if not isinstance(second, ast.Starred) and ast.dump(first) != ast.dump(second):
                swapped = [second, first, *rest]
                yield "swapped arguments", ast.unparse(ast.Call(node.func, swapped, node.keywords))
        case ast.Return(value=ast.expr()) if not _is_none(node.value):
            yield "return None", "return None"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", "pass"
        case _ if isinstance(node, DROPPED) and scope:
            yield "dropped statement", "pass"


def _text(node: ast.expr) -> str:
    text = ast.unparse(node)
    return f"({text})" if isinstance(node, ast.BoolOp | ast.IfExp | ast.Lambda | ast.NamedExpr | ast.Compare) else text


def _has_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and "'" in ast.unparse(side) for side in (node.left, node.right)
    )


def _is_none(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
