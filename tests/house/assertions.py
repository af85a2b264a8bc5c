"""Tests that cannot fail: no assertion, an assertion of a constant, of a thing against itself, or a swallowed one.

A test asserts when it has an assert, a raise, a `pytest.raises`, `warns` or `fail`, an `assert_...` of a library, an
expectation of a browser (`to_be_visible()`), a process that must succeed (`check=True`), or when it names a function
that does: one of its own file, or of the files of the tests that its file imports. A test whose claim is that nothing
is raised has the mark `raises_nothing`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.house import sources
from tests.house.sources import tree_of

CHECKS = {"raises", "warns", "fail"}
BEGINNINGS = ("assert_", "to_be_", "to_have_", "to_contain_", "not_to_be_", "not_to_have_", "not_to_contain_")
RAISES_NOTHING = "raises_nothing"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Body:
    """A function: the names that it mentions, and whether it asserts by itself."""

    node: Function
    names: frozenset[str]
    asserts: bool

    @classmethod
    def of(cls, node: Function) -> Body:
        """Read a function's syntax tree."""
        inside = list(ast.walk(node))
        names = {each.id for each in inside if isinstance(each, ast.Name)}
        names |= {each.attr for each in inside if isinstance(each, ast.Attribute)}
        return cls(node, frozenset(names), any(map(_is_check, inside)))


def find() -> Iterator[str]:
    """Yield a line for each test that cannot fail."""
    for path in sorted((sources.REPOSITORY / "tests").rglob("test_*.py")):
        asserting = _asserting_names(path)
        for body in _bodies(path):
            for line, problem in _problems(body, asserting):
                yield f"{path.relative_to(sources.REPOSITORY)}:{line}: {body.node.name}: {problem}"


def _is_check(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr in CHECKS or node.attr.startswith(BEGINNINGS) or node.attr == RAISES_NOTHING
    if isinstance(node, ast.keyword):
        return node.arg == "check" and isinstance(node.value, ast.Constant) and node.value.value is True
    return isinstance(node, ast.Assert | ast.Raise)


def _problems(body: Body, asserting: frozenset[str]) -> Iterator[tuple[int, str]]:
    if body.node.name.startswith("test_") and not body.asserts and not body.names & asserting:
        yield body.node.lineno, "it asserts nothing"
    for node in ast.walk(body.node):
        if isinstance(node, ast.Assert):
            if isinstance(node.test, ast.Constant | ast.Tuple):
                yield node.lineno, "it asserts a constant"
            elif _compares_with_itself(node.test):
                yield node.lineno, "it compares a thing with itself"
        elif isinstance(node, ast.Try) and any(map(_swallows, node.handlers)):
            if any(isinstance(inside, ast.Assert) for statement in node.body for inside in ast.walk(statement)):
                yield node.lineno, "it catches its own assertion"


@cache
def _bodies(path: Path) -> tuple[Body, ...]:
    return tuple(Body.of(node) for node in ast.walk(tree_of(path)) if isinstance(node, Function))


@cache
def _asserting_names(path: Path) -> frozenset[str]:
    """Return the functions that assert, or name one that does, of a file and of those that it imports."""
    bodies = [body for file in _reachable(path) for body in _bodies(file) if not body.node.name.startswith("test_")]
    found = frozenset(body.node.name for body in bodies if body.asserts)
    while more := frozenset(body.node.name for body in bodies if body.names & found) - found:
        found |= more
    return found


def _reachable(path: Path) -> set[Path]:
    """Return a file and every file of the tests that it imports, by whatever way."""
    found, waiting = set(), [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _imports(file)
    return found


@cache
def _imports(path: Path) -> tuple[Path, ...]:
    names: list[str] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    files = [sources.REPOSITORY / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]
    return tuple(file for file in files if file.exists())


def _compares_with_itself(test: ast.expr) -> bool:
    if not isinstance(test, ast.Compare) or len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.Is):
        return False
    left, right = test.left, test.comparators[0]
    return not any(isinstance(node, ast.Call) for node in ast.walk(left)) and ast.dump(left) == ast.dump(right)


def _swallows(handler: ast.ExceptHandler) -> bool:
    caught = {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"all"}
    return bool(caught & {"all", "AssertionError", "Exception", "BaseException"}) and not any(
        isinstance(node, ast.Raise) for statement in handler.body for node in ast.walk(statement)
    )
