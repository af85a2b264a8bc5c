"""The files of the package, parsed once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "src" / "holdfast"


@cache
def files() -> tuple[Path, ...]:
    """Return every Python file of the package, sorted."""
    return tuple(sorted(PACKAGE.rglob("*.py")))


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text())


def place(path: Path) -> str:
    """Return a file's path below the package."""
    return path.relative_to(PACKAGE).as_posix()
