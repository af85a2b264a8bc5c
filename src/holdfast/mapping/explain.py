"""Explain a program: a line per target with its source boxes, or only its names where shapes are unknown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.mapping.compile.compile import Compiled, TargetTP, compile_program
from holdfast.mapping.expand.expand import WorkBudget, expand
from holdfast.mapping.syntax.statement import UNKNOWN, Sized, Spec, Statement
from holdfast.plan.recipe import NEW, Recipe, Term

Keys = Mapping[str, Any] | Iterable[Any]


def explain(
    statements: Sequence[Statement],
    keys: Keys,
    targets: Keys | None = None,
    *,
    source_tp: int | None = None,
    target_tp: TargetTP = None,
) -> str:
    """Return one line per target and box, or only names where shapes are not known."""
    sources, wanted = specs_of(keys), None if targets is None else specs_of(targets)
    known = {key: spec for key, spec in sources.items() if spec is not None}
    if len(known) < len(sources):
        return "".join(f"{line}\n" for line in _name_lines(statements, sources, wanted))
    compiled = compile_program(statements, known, wanted, source_tp=source_tp, target_tp=target_tp)
    return "".join(f"{line}\n" for line in _recipe_lines(compiled))


def specs_of(keys: Keys) -> dict[str, Spec | None]:
    """Normalize keys given as {key: shape}, {key: (shape, dtype)}, specs with a key, or bare keys."""
    if isinstance(keys, Mapping):
        return {key: _spec(key, value) for key, value in keys.items()}
    out: dict[str, Spec | None] = {}
    for item in keys:
        if isinstance(item, str):
            out[item] = None
        else:
            out[item.key] = _spec(item.key, item)
    return out


def _spec(key: str, value: Any) -> Spec | None:
    if value is None:
        return None
    if hasattr(value, "shape") and isinstance(getattr(value, "dtype", None), DType):
        return Sized(tuple(value.shape), value.dtype)
    shape, dtype = value, UNKNOWN
    if isinstance(value, Sequence) and len(value) == 2 and isinstance(value[1], str | DType):
        shape, name = value
        dtype = name if isinstance(name, DType) else dtype_named(name)
    try:
        return Sized(tuple(int(size) for size in shape), dtype)
    except (TypeError, ValueError):
        raise InvalidArgument(f"{key!r}: {value!r} is neither a shape nor a (shape, dtype) pair") from None


def _recipe_lines(compiled: Compiled) -> Iterator[str]:
    for target, recipe in compiled.recipes.items():
        kind = "" if recipe.dtype is UNKNOWN else f" {recipe.dtype.name}"
        head = f"{target}: {list(recipe.shape)}{kind}"
        if len(recipe.terms) == 1 and _is_whole(recipe, compiled):
            yield f"{head} <- {recipe.terms[0].source}{_changes(recipe.terms[0])}"
            continue
        yield head
        for term in recipe.terms:
            yield f"  {_box(term.box)} <- {term.source} {_box(term.part)}{_changes(term)}"
    for target in sorted(compiled.kept):
        yield f"{target}: keeps its initial value"
    for name, statement in compiled.dropped.items():
        yield f"dropped: {name}, which {statement.where} makes and nothing uses"
    yield from _unmatched_lines(compiled.missing, compiled.removed, compiled.unused)


def _unmatched_lines(missing: Iterable[str], removed: Iterable[str], unused: Iterable[str]) -> Iterator[str]:
    for target in missing:
        yield f"{target}: missing, nothing makes it"
    for source in sorted(removed):
        yield f"removed: {source}"
    for source in unused:
        yield f"unused: {source}"


def _is_whole(recipe: Recipe[str], compiled: Compiled) -> bool:
    term = recipe.terms[0]
    return term.part == Box.full(tuple(compiled.sources[term.source].shape))


def _box(box: Box) -> str:
    ends = zip(box.offsets, box.stops, strict=True)
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in ends) + "]"


def _changes(term: Term[str]) -> str:
    dims = ", ".join("new" if dim == NEW else str(dim) for dim in term.order)
    transposed = "" if term.order == tuple(range(len(term.part.sizes))) else f", dims [{dims}]"
    return transposed + "".join(f", cast to {dtype.name}" for dtype in term.casts)


def _name_lines(
    statements: Sequence[Statement], sources: Iterable[str], targets: Iterable[str] | None
) -> Iterator[str]:
    """Describe what names alone reveal: the sources of each target and the statement that builds it."""
    trace = _NameTrace(sources)
    for expansion in expand(statements, dict.fromkeys(trace.sources), targets, WorkBudget()):
        for step in expansion.steps:
            trace.step(step.lefts, step.rights)
        trace.finish(expansion.statement)
    yield from trace.lines(targets)


class _NameTrace:
    """Tracks the sources of each name while a program runs."""

    def __init__(self, sources: Iterable[str]) -> None:
        self.sources = tuple(sources)
        self._values: dict[str, tuple[str, ...]] = {source: (source,) for source in self.sources}
        self._by: dict[str, Statement] = {}
        self._used: set[str] = set()
        self._removed: set[str] = set()
        self._kept: dict[str, None] = {}
        self._made: dict[str, tuple[str, ...]] = {}

    def step(self, lefts: Sequence[str], rights: Sequence[str]) -> None:
        if not lefts:
            self._values.pop(rights[0], None)
            self._kept[rights[0]] = None
        elif not rights:
            self._values.pop(lefts[0], None)
            self._removed.add(lefts[0])
        else:
            made = tuple(dict.fromkeys(source for left in lefts for source in self._values[left]))
            self._used.update(lefts)
            self._made.update(dict.fromkeys(rights, made))

    def finish(self, statement: Statement) -> None:
        for name, made in self._made.items():
            self._values[name] = made
            self._by[name] = statement
            self._used.discard(name)
        self._made = {}

    def lines(self, targets: Iterable[str] | None) -> Iterator[str]:
        wanted = [name for name in self._values if name not in self._used] if targets is None else list(targets)
        for name in wanted:
            if name in self._values:
                by = f" ({self._by[name].where})" if name in self._by else ""
                yield f"{name} <- {', '.join(self._values[name])}{by}"
        for name in self._kept:
            yield f"{name}: keeps its initial value"
        in_use = {source for name in wanted for source in self._values.get(name, ())}
        missing = (name for name in wanted if name not in self._values and name not in self._kept)
        unused = (name for name in self.sources if name not in in_use and name not in self._removed)
        yield from _unmatched_lines(missing, (name for name in self._removed if name in self.sources), unused)
