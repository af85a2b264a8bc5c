"""Expand a program: replace ids, stars and arrays by the existing keys, within a limited amount of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.mapping.expand.expansion import ExpandedStep, Expansion
from holdfast.mapping.expand.hole_numbers import HoleNumbers, bound_key, filled
from holdfast.mapping.expand.join import Row, joined
from holdfast.mapping.expand.name_index import NameIndex, nearest
from holdfast.mapping.expand.shapes import Shapes, stack_dim
from holdfast.mapping.syntax.statement import STAR, Key, Spec, Statement


class WorkBudget:
    """Limits the total size of an expanded mapping, so that a short program cannot cause unbounded work."""

    def __init__(self, limit: int = limits.MAPPING_WORK) -> None:
        self._left = self._limit = limit

    def spend(self, amount: int, statement: Statement) -> None:
        self._left -= amount
        if self._left < 0:
            raise statement.error(f"the mapping expands to more than {self._limit} names and boxes", InvalidArgument)


def expand(
    statements: Sequence[Statement], sources: Mapping[str, Spec | None], targets: Iterable[str] | None, work: WorkBudget
) -> Iterator[Expansion]:
    """Yield each statement with its steps, in order. `targets` is None if they are unknown."""
    known = None if targets is None else NameIndex(targets)
    return _Expander(NameIndex(sources), known, Shapes(sources), work).run(statements)


class _Expander:
    def __init__(self, names: NameIndex, targets: NameIndex | None, shapes: Shapes, work: WorkBudget) -> None:
        self._names = names
        self._targets = targets
        self._shapes = shapes
        self._work = work

    def run(self, statements: Sequence[Statement]) -> Iterator[Expansion]:
        self._hole_numbers = HoleNumbers(statements, self._targets, self._work.spend)
        for number, statement in enumerate(statements):
            self._number = number
            if not statement.lefts:
                steps = self._add_steps(statement)
            elif not statement.rights:
                steps = self._remove_steps(statement)
            else:
                steps = self._make_steps(statement)
                _check_made_once(statement, steps)
                for step in steps:
                    self._shapes.follow(statement, step)
                    for name in step.rights:
                        self._names.add(name)
            yield Expansion(statement, tuple(steps))

    def _add_steps(self, statement: Statement) -> list[ExpandedStep]:
        steps = []
        for key in self._expand_arrays(statement, statement.rights):
            if self._targets is None and (key.holes or statement.is_optional):
                continue  # without given targets, there are no others to keep
            found = [filled(key, "0")] if self._targets is None else [name for name, _ in self._targets.match(key)]
            if not found and not statement.is_optional:
                raise statement.error(
                    f"no target matches {key.pattern}{nearest(filled(key, '0'), self._targets or ())}", key=key
                )
            self._work.spend(len(found), statement)
            for name in found:
                self._names.discard(name)
                steps.append(ExpandedStep((), (name,)))
        return steps

    def _remove_steps(self, statement: Statement) -> list[ExpandedStep]:
        names: dict[str, None] = {}
        for key in self._expand_arrays(statement, statement.lefts):
            found = [name for name, _ in self._names.match(key)]
            self._work.spend(len(found) + 1, statement)
            if not found and not statement.is_optional:
                raise statement.error(
                    f"no key matches {key.pattern} to remove{nearest(filled(key, '0'), self._names)}", key=key
                )
            names.update(dict.fromkeys(found))
        for name in names:
            self._names.discard(name)
        return [ExpandedStep((name,), ()) for name in names]

    def _expand_arrays(self, statement: Statement, keys: Iterable[Key]) -> list[Key]:
        """Replace every array by its members."""
        self._work.spend(sum(key.count for key in keys), statement)
        return [single for key in keys for single in key.members()]

    def _make_steps(self, statement: Statement) -> list[ExpandedStep]:
        lefts = self._expand_arrays(statement, statement.lefts)
        rights = self._expand_arrays(statement, statement.rights)
        return [self._step(statement, rights, row) for row in joined(statement, lefts, self._names, self._work.spend)]

    def _step(self, statement: Statement, keys: Sequence[Key], row: Row) -> ExpandedStep:
        rights: list[str] = []
        transposed: list[bool] = []
        for key in keys:
            names = self._right_names(statement, key, row)
            rights.extend(names)
            transposed.extend([key.transposed] * len(names))
        self._work.spend(len(rights), statement)
        _check_parts(statement, len(row.names))
        return ExpandedStep(row.names, tuple(rights), row.transposed, tuple(transposed))

    def _right_names(self, statement: Statement, key: Key, row: Row) -> list[str]:
        partly_bound = bound_key(key, row.ids)
        if partly_bound is None:
            known = ", ".join(f"${name} is {value}" for name, value in row.ids.items())
            raise statement.error(f"{known}: {key.pattern} has no valid number")
        if not partly_bound.holes:
            return [filled(partly_bound, "")]
        if len({hole.name for hole in partly_bound.holes}) > 1:
            raise statement.error(f"{partly_bound.pattern}: at most one hole can appear only on the right")
        count = statement.options.parts or self._slices(statement, partly_bound, row)
        if count is not None:
            self._work.spend(count, statement)
            return [filled(partly_bound, str(number)) for number in range(count)]
        return self._target_names(statement, partly_bound)

    def _slices(self, statement: Statement, key: Key, row: Row) -> int | None:
        """Return the number of slices to unstack, if the shape gives it and no target or later statement does."""
        if not statement.unstacks or len(statement.rights) > 1:
            return None
        shape = self._shapes.whole(statement, ExpandedStep(row.names, (), row.transposed))
        dim = None if shape is None else stack_dim(statement, len(shape))
        if (
            shape is None
            or dim is None
            or (self._targets is not None and self._hole_numbers.numbers(key, self._number))
        ):
            return None
        return shape[dim]

    def _target_names(self, statement: Statement, key: Key) -> list[str]:
        if self._targets is None:
            raise statement.error(
                f"the number of keys that {key.pattern} stands for is unknown without targets: add parts="
            )
        numbers = self._hole_numbers.numbers(key, self._number)
        if not numbers:
            raise statement.error(
                f"no target matches {key.pattern}{nearest(filled(key, '0'), self._targets)}; if it is a temporary, "
                "add parts="
            )
        return [filled(key, number) for number in numbers]


def _check_parts(statement: Statement, count: int) -> None:
    """Check `parts=` against the number of left keys, if they have a star."""
    parts = statement.options.parts
    if parts is not None and any(key.has_star for key in statement.lefts) and count != parts:
        raise statement.error(f"parts={parts}, but the left side matches {count} keys")


def _check_made_once(statement: Statement, steps: Iterable[ExpandedStep]) -> None:
    seen: set[str] = set()
    for step in steps:
        for name in step.rights:
            if name in seen:
                raise statement.error(
                    f"{name!r} would be made more than once; an id that appears only on the left does not collect "
                    f"keys: write {STAR} instead"
                )
            seen.add(name)
