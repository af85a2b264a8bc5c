"""The pages of docs/api list every public name exactly once, and nothing that is not there."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest

import holdfast
from holdfast import keep, when
from tests.docs.pages import REPOSITORY

PACKAGE = REPOSITORY / "src" / "holdfast"
LISTED = Counter(
    name
    for page in sorted((REPOSITORY / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
)
# Packages that state their public names, and may import a framework that is not installed: they are parsed.
PACKAGES = ["spmd", "tokens", "testing/conformance", "testing/faults.py", "integrations/pytorch_lightning.py"]
PACKAGES += [f"integrations/{name}" for name in ("accelerate", "lightning", "ray", "torchtitan", "transformers")]


def public_names() -> Iterator[str]:
    """Yield the public names: those of holdfast, of its modules keep and when, and of the packages."""
    for name in holdfast.__all__:
        if not isinstance(getattr(holdfast, name), ModuleType):
            yield f"holdfast.{name}"
    yield from _returning(keep, keep.Policy)
    yield from _returning(when, when.Occasion)
    for package in PACKAGES:
        module = package.removesuffix(".py").replace("/", ".")
        yield from (f"holdfast.{module}.{name}" for name in _stated(package))


def _returning(module: ModuleType, kind: type) -> Iterator[str]:
    """Yield a class, and the public functions of a module that return one."""
    yield f"{module.__name__}.{kind.__name__}"
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("_") and function.__annotations__.get("return") == kind.__name__:
            yield f"{module.__name__}.{name}"


def _stated(package: str) -> list[str]:
    path = PACKAGE / package if package.endswith(".py") else PACKAGE / package / "__init__.py"
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise AssertionError(f"{path} states no public names")


PUBLIC = sorted(public_names())


def test_every_public_name_is_listed() -> None:
    assert len(PUBLIC) > 80
    assert sorted(set(PUBLIC) - LISTED.keys()) == []


def test_no_name_is_listed_twice() -> None:
    assert [name for name, count in LISTED.items() if count > 1] == []


@pytest.mark.parametrize("name", sorted(LISTED.keys() - set(PUBLIC)))
def test_a_name_beside_the_public_ones_exists(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    assert inspect.getdoc(getattr(importlib.import_module(module), attribute))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    for page in (REPOSITORY / "docs" / "api").glob("*.md"):
        assert f": api/{page.name}\n" in navigation, page
