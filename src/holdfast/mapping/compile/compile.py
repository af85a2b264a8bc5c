"""Compile a program: run its expanded statements in order, so that every target becomes a recipe over sources."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Mismatch
from holdfast.core.warnings import warn
from holdfast.mapping.compile.evaluate import Recipes, StepContext, evaluate
from holdfast.mapping.compile.lookahead import Lookahead
from holdfast.mapping.expand.expand import WorkBudget, expand
from holdfast.mapping.expand.expansion import ExpandedStep, Expansion
from holdfast.mapping.expand.name_index import NameIndex, nearest
from holdfast.mapping.syntax.statement import Key, Spec, Statement
from holdfast.plan.recipe import Recipe

Trace = Callable[[int, ExpandedStep, Recipes], None]
TargetTP = Callable[[str], int | None] | int | None


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a program for given sources and targets.

    `recipes` build targets from sources; `kept` targets keep their initial value; `missing` targets have
    no source; `removed` sources were removed by a statement; `unused` sources are left over. `made_by` maps
    a target to the statement that makes it, without targets taken from the source of the same name.
    `dropped` has the unused results of AOA config statements.
    """

    recipes: dict[str, Recipe[str]]
    kept: frozenset[str]
    removed: frozenset[str]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    sources: Mapping[str, Spec]
    made_by: Mapping[str, Statement]
    dropped: Mapping[str, Statement] = field(default_factory=dict)


@dataclass(slots=True)
class _NamedRecipe:
    """The recipe of a name at a point of the program, and whether anything used it."""

    recipe: Recipe[str]
    statement: Statement | None = None
    used: bool = False
    wanted: bool = False  # by `a -> a`: a target even if used


def compile_program(
    statements: Sequence[Statement],
    sources: Mapping[str, Spec],
    targets: Mapping[str, Spec | None] | None,
    *,
    source_tp: int | None = None,
    target_tp: TargetTP = None,
    spare: Container[str] = (),
    lenient: Callable[[str], bool] = lambda name: False,
    max_work: int = limits.MAPPING_WORK,
    trace: Trace | None = None,
) -> Compiled:
    """Run the statements over the sources. Raises Mismatch where they do not fit together.

    A target must not replace an unused source of the same name unless it is in `spare`. Unwanted results
    and shapes other than the target's are errors, except for targets for which `lenient` is true: the
    caller handles those.
    `trace` is called for every step with the number of its statement and the recipes of its sources.
    """
    work = WorkBudget(max_work)
    expansions = list(expand(statements, sources, targets, work))
    context = StepContext(source_tp, _degree_lookup(target_tp), Lookahead(expansions, targets or {}), work)
    compiler = _Compiler(sources, targets, context, work, trace, spare, lenient)
    for number, expansion in enumerate(expansions):
        compiler.execute(number, expansion)
    _warn_if_nothing_matches(expansions, sources)
    return compiler.result()


def _warn_if_nothing_matches(expansions: Sequence[Expansion], sources: Mapping[str, Spec]) -> None:
    """Warn if a program does nothing because its statements are all optional and match no source."""
    unmatched = [expansion.statement for expansion in expansions if expansion.statement.lefts]
    if not unmatched or not sources or any(expansion.steps for expansion in expansions):
        return
    if all(statement.aoa for statement in unmatched):
        known = ", ".join(map(repr, itertools.islice(sources, 3)))
        warn(
            f"mapping: none of the {len(unmatched)} statements matches a source, so all keys stay unchanged. The "
            f"first, {unmatched[0].where}, expects {unmatched[0].lefts[0].pattern!r}; the sources begin with {known}"
        )


def _degree_lookup(target_tp: TargetTP) -> Callable[[str], int | None]:
    return target_tp if callable(target_tp) else lambda key: target_tp


@dataclass(slots=True)
class _Compiler:
    sources: Mapping[str, Spec]
    targets: Mapping[str, Spec | None] | None
    context: StepContext
    work: WorkBudget
    trace: Trace | None
    spare: Container[str]
    lenient: Callable[[str], bool]
    values: dict[str, _NamedRecipe] = field(default_factory=dict)
    removed_by: dict[str, Statement] = field(default_factory=dict)
    removed: dict[str, None] = field(default_factory=dict)
    kept: dict[str, None] = field(default_factory=dict)
    used_sources: set[str] = field(default_factory=set)
    dropped: dict[str, Statement] = field(default_factory=dict)

    def execute(self, number: int, expansion: Expansion) -> None:
        made: list[tuple[str, Recipe[str], ExpandedStep]] = []
        for step in expansion.steps:
            if not step.lefts:
                self._add(expansion.statement, step.rights[0])
            elif not step.rights:
                self._remove(expansion.statement, step.lefts[0])
            else:
                recipes = self._evaluated(number, expansion.statement, step)
                made.extend((name, recipe, step) for name, recipe in zip(step.rights, recipes, strict=True))
        for name, recipe, step in made:
            self._make(expansion.statement, step, name, recipe)

    def _value(self, name: str) -> _NamedRecipe | None:
        """Return the current value of the name, or None."""
        if name not in self.values and name not in self.removed_by and name in self.sources:
            spec = self.sources[name]
            self.values[name] = _NamedRecipe(Recipe.whole(name, tuple(spec.shape), spec.dtype))
        return self.values.get(name)

    def _use(self, name: str, statement: Statement) -> Recipe[str]:
        value = self._value(name)
        if value is None:  # it was expanded, so an earlier statement removed it
            raise statement.error(f"{name!r} was removed by {self.removed_by[name].where}")
        self._mark_used(name, value)
        return value.recipe

    def _mark_used(self, name: str, value: _NamedRecipe) -> None:
        value.used = True
        if value.statement is None:
            self.used_sources.add(name)

    def _evaluated(self, number: int, statement: Statement, step: ExpandedStep) -> Recipes:
        sources = [self._use(name, statement) for name in step.lefts]
        if self.trace is not None:
            self.trace(number, step, sources)
        terms = sum(len(source.terms) for source in sources)
        self.work.spend(terms + len(step.rights), statement)
        recipes = evaluate(statement, number, step, sources, self.context)
        self.work.spend(sum(len(recipe.terms) for recipe in recipes), statement)
        return recipes

    def _make(self, statement: Statement, step: ExpandedStep, name: str, recipe: Recipe[str]) -> None:
        before = self._value(name)
        if before is not None and before.statement is not None and not before.used:
            raise statement.error(
                f"{name!r}, made by {before.statement.where}, is unused, and this statement would replace it"
            )
        if before is not None and before.statement is None and not before.used and name not in self.spare:
            raise statement.error(
                f"{name!r} is also a source that nothing has used, and this statement would replace it; "
                f"rename it first, or write `{name} -> _` before"
            )
        wanted = before is not None and step.lefts == step.rights and recipe is before.recipe
        self.values[name] = _NamedRecipe(recipe, statement, wanted=wanted)
        self.removed_by.pop(name, None)
        self.kept.pop(name, None)

    def _pop(self, statement: Statement, name: str) -> _NamedRecipe | None:
        value = self._value(name)
        self.values.pop(name, None)
        self.removed_by[name] = statement
        return value

    def _add(self, statement: Statement, name: str) -> None:
        value = self._pop(statement, name)
        if value is not None and value.statement is not None and not value.used:
            raise statement.error(
                f"{name!r} was made by {value.statement.where} and cannot also keep its initial value"
            )
        if value is not None and value.statement is None and not value.used:
            self.removed[name] = None
        self.kept[name] = None

    def _remove(self, statement: Statement, name: str) -> None:
        value = self._pop(statement, name)
        if value is not None and value.statement is None:
            self.removed[name] = None

    def result(self) -> Compiled:
        outputs = self._all_outputs() if self.targets is None else self._target_outputs(self.targets)
        targets = self.targets if self.targets is not None else {**outputs, **self.kept}
        unused = (name for name in self.sources if name not in self.used_sources and name not in self.removed)
        return Compiled(
            {name: value.recipe for name, value in outputs.items()},
            frozenset(self.kept),
            frozenset(name for name in self.removed if name not in self.used_sources),
            tuple(unused),
            tuple(name for name in targets if name not in outputs and name not in self.kept),
            self.sources,
            {name: value.statement for name, value in outputs.items() if value.statement is not None},
            self.dropped,
        )

    def _all_outputs(self) -> dict[str, _NamedRecipe]:
        """Return the names unused since they were made, and the unused sources."""
        outputs: dict[str, _NamedRecipe] = {}
        for name in dict.fromkeys((*self.sources, *self.values)):
            value = self._value(name)
            if value is not None and (value.wanted or not value.used):
                outputs[name] = value
                self._mark_used(name, value)
        return outputs

    def _target_outputs(self, targets: Mapping[str, Spec | None]) -> dict[str, _NamedRecipe]:
        outputs: dict[str, _NamedRecipe] = {}
        for name, spec in targets.items():
            value = None if name in self.kept else self._value(name)
            if value is not None:
                self._mark_used(name, value)
                if not self.lenient(name):
                    _check_shape(name, value, spec)
                outputs[name] = value
        missing = [name for name in targets if name not in outputs and name not in self.kept]
        for name, value in self.values.items():
            if value.statement is not None and not value.used and not self.lenient(name):
                self._drop(name, value.statement, targets, missing)
        return outputs

    def _drop(self, name: str, statement: Statement, targets: Mapping[str, Any], missing: Sequence[str]) -> None:
        """Drop an unused result if its statement allows that and no target misses it."""
        if statement.aoa and not nearest(name, missing):
            self.dropped[name] = statement
            return
        near = nearest(name, missing) or nearest(name, targets)
        raise statement.error(
            f"{name!r} is not a target, and no later statement uses it: misspelt?{near}; if it is not wanted, "
            f"add `{Key((name,)).pattern} -> _`",
            key=_key_of(statement.rights, name),
        )


def _key_of(keys: Sequence[Key], name: str) -> Key | None:
    """Return the key of a statement that stands for a name."""
    one = NameIndex([name])
    return next((key for key in keys for single in key.members() if any(True for _ in one.match(single))), None)


def _check_shape(name: str, value: _NamedRecipe, spec: Spec | None) -> None:
    if spec is None or tuple(spec.shape) == value.recipe.shape:
        return
    found = f"the target {name!r} has the shape {list(spec.shape)}, but its sources give {list(value.recipe.shape)}: "
    found += ", ".join(value.recipe.sources()[:6])
    if value.statement is not None:
        raise value.statement.error(found, key=_key_of(value.statement.rights, name))
    raise Mismatch(f"{found}; no statement of the mapping makes this target")
