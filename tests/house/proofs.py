"""Every guarantee of docs/guarantees.md names the tests that prove it, and each of them exists.

Test files are parsed, never imported, so that the check takes a moment.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.house import sources
from tests.house.sources import tree_of

GUARANTEES = "docs/guarantees.md"
PROOF = re.compile(r"`([^`]+)`")
TEST_ID = re.compile(r"(?P<file>tests/[\w/]+\.py)::(?:(?P<class>\w+)::)?(?P<test>\w+)(?:\[(?P<case>[^\]]+)\])?")
ROWS = re.compile(r"rows_\w+")
TARGET = re.compile(r"make (\w+)")
# Where a test class finds the tests that it inherits.
CONFORMANCE = "src/holdfast/testing/conformance"


def find() -> Iterator[str]:
    """Yield a line for each guarantee without a proof, and for each proof that does not exist."""
    in_table = False
    for number, line in enumerate((sources.REPOSITORY / GUARANTEES).read_text().splitlines(), 1):
        in_table = line.startswith("|") and (in_table or line == "| guarantee | test |")
        if not in_table or line.startswith(("| guarantee |", "|---")):
            continue
        proofs = PROOF.findall(line.rsplit(" | ", 1)[1])
        if not proofs:
            yield f"{GUARANTEES}:{number}: a guarantee without a proof"
        for proof in proofs:
            if problem := _problem(proof):
                yield f"{GUARANTEES}:{number}: {proof}: {problem}"


def _problem(proof: str) -> str:
    if ROWS.fullmatch(proof):
        return (
            "" if (sources.REPOSITORY / "tests/faults" / f"{proof}.py").exists() else "no such module of tests/faults"
        )
    if target := TARGET.fullmatch(proof):
        makefile = (sources.REPOSITORY / "Makefile").read_text()
        return "" if re.search(rf"^{target[1]}:", makefile, re.MULTILINE) else "no such target of the Makefile"
    parts = TEST_ID.fullmatch(proof)
    if parts is None:
        return "neither a pytest id, nor a module rows_* of tests/faults, nor a make target"
    path = sources.REPOSITORY / parts["file"]
    if not path.exists():
        return "no such file"
    if parts["test"] not in (_methods(path, parts["class"]) if parts["class"] else _functions(tree_of(path))):
        return "no such test"
    if parts["case"] and parts["case"] not in _texts(path):
        return "no such case"
    return ""


def _functions(scope: ast.Module | ast.ClassDef) -> set[str]:
    return {node.name for node in scope.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _methods(path: Path, name: str) -> set[str]:
    """Return the methods of a class, with those inherited from its file's classes or from the conformance suite."""
    classes = {**_conformance_classes(), **_classes(path)}
    waiting, found = [name], set()
    while waiting:
        node = classes.get(waiting.pop())
        if node is not None:
            found |= _functions(node)
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return found


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree_of(path).body if isinstance(node, ast.ClassDef)}


@cache
def _conformance_classes() -> dict[str, ast.ClassDef]:
    found: dict[str, ast.ClassDef] = {}
    for path in sorted((sources.REPOSITORY / CONFORMANCE).glob("*.py")):
        found |= _classes(path)
    return found


def _texts(path: Path) -> set[str]:
    """Return the texts of a file: the name of a case is one of them."""
    return {
        node.value for node in ast.walk(tree_of(path)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
