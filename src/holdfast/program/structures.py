"""The structure of inputs and outputs: tuples, lists and dicts of leaves, flattened and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.program import program_limits as most
from holdfast.program.arguments import Problem

KINDS = frozenset({"leaf", "none", "tuple", "list", "dict"})


class StructureProblem(ValueError):
    """Inputs of another structure than the program was exported with."""


@dataclass(frozen=True, slots=True)
class Structure:
    """A leaf, a None, or a container of trees. A dict has `keys`; `was` is the class of an output that became one."""

    kind: str = "leaf"
    items: tuple[Structure, ...] = ()
    keys: tuple[str, ...] = ()
    was: str = ""

    @property
    def leaves(self) -> int:
        """The number of leaves."""
        return 1 if self.kind == "leaf" else sum(item.leaves for item in self.items)


class NamedOutputs(dict[str, Any]):
    """Outputs by name that can also be read as attributes, as those of transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the program has no output {name!r}; it has {', '.join(self)}") from None


def flatten(value: Any, tree: Structure, where: str = "the inputs") -> Iterator[Any]:
    """Yield the leaves of a value that has the structure of `tree`; raises StructureProblem if it has another."""
    if tree.kind == "leaf":
        yield value
        return
    if tree.kind == "none":
        if value is not None:
            raise StructureProblem(f"{where} is None in the program, and {type(value).__name__} here")
        return
    expected = {"tuple": tuple, "list": list, "dict": dict}[tree.kind]
    if not isinstance(value, expected):
        raise StructureProblem(f"{where} is a {tree.kind} in the program, and {type(value).__name__} here")
    if tree.kind != "dict":
        if len(value) != len(tree.items):
            raise StructureProblem(f"{where} has {len(tree.items)} items in the program, and {len(value)} here")
        for index, (item, part) in enumerate(zip(value, tree.items, strict=True)):
            yield from flatten(item, part, f"{where}[{index}]")
        return
    known = set(tree.keys)
    missing = [key for key in tree.keys if key not in value]
    extra = [str(key) for key in value if key not in known]
    if missing or extra:
        raise StructureProblem(
            f"{where} of the program: {_some(tree.keys) or 'none'}"
            + (f"; missing: {_some(missing)}" if missing else "")
            + (f"; unexpected: {_some(extra)}" if extra else "")
        )
    for key, part in zip(tree.keys, tree.items, strict=True):
        yield from flatten(value[key], part, f"{where}[{key!r}]")


def _some(names: Sequence[str]) -> str:
    """Return names for an error, the first ones of many."""
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(name[:80] for name in names[:20]) + more


def unflatten(leaves: Sequence[Any], tree: Structure) -> Any:
    """Return the value with these leaves. Outputs of a class that the program does not import become dicts or lists."""
    return _build(iter(leaves), tree)


def _build(leaves: Iterator[Any], tree: Structure) -> Any:
    if tree.kind == "leaf":
        return next(leaves)
    if tree.kind == "none":
        return None
    items = [_build(leaves, part) for part in tree.items]
    if tree.kind == "dict":
        named = zip(tree.keys, items, strict=True)
        return NamedOutputs(named) if tree.was else dict(named)
    return tuple(items) if tree.kind == "tuple" else items


def encode_structure(tree: Structure) -> Any:
    """Return a structure as JSON data: `"*"` for a leaf, null for None."""
    if tree.kind in ("leaf", "none"):
        return "*" if tree.kind == "leaf" else None
    fields: dict[str, Any] = {tree.kind: [encode_structure(item) for item in tree.items]}
    if tree.kind == "dict":
        fields["keys"] = list(tree.keys)
    if tree.was:
        fields["was"] = tree.was
    return fields


def decode_structure(data: Any, problem: Problem, depth: int = 0) -> Structure:
    """Return the structure of JSON data; raises `problem(text)` for another thing."""
    if data == "*":
        return Structure()
    if data is None:
        return Structure("none")
    if depth >= most.TREE_DEPTH:
        raise problem(f"a structure nested deeper than {most.TREE_DEPTH}")
    if not isinstance(data, dict) or not data:
        raise problem("a structure that is not a leaf, a tuple, a list or a dict")
    kind = next(iter(data))
    items, was = data[kind], data.get("was", "")
    if kind not in ("tuple", "list", "dict") or not isinstance(items, list) or not isinstance(was, str):
        raise problem(f"the unknown structure {str(kind)[:40]!r}")
    if len(items) > most.LIST_ITEMS:
        raise problem(f"a structure of {len(items)} items, more than the limit of {most.LIST_ITEMS}")
    if set(data) - {kind, "was", *(("keys",) if kind == "dict" else ())}:
        raise problem("a structure with unknown fields")
    keys = data.get("keys", []) if kind == "dict" else []
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) != len(keys):
        raise problem("a dict whose keys are not different texts")
    if kind == "dict" and len(keys) != len(items):
        raise problem(f"a dict of {len(items)} items with {len(keys)} keys")
    parts = tuple(decode_structure(item, problem, depth + 1) for item in items)
    return Structure(kind, parts, tuple(keys), was[: most.TEXT_CHARS])
