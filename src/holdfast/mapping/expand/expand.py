"""Expanding a program: ids, stars and arrays become the keys that there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.mapping.expand.expansion import Expansion, Step
from holdfast.mapping.expand.hole_numbers import Later, bound_key, filled
from holdfast.mapping.expand.join import Row, joined
from holdfast.mapping.expand.name_index import Names, nearest
from holdfast.mapping.expand.shapes import Shapes, stack_dim
from holdfast.mapping.syntax.statement import STAR, Key, Spec, Statement


class Work:
    """Counts what a mapping comes to, so that a short program cannot ask for endless work."""

    def __init__(self, limit: int = limits.MAPPING_WORK) -> None:
        self._left = self._limit = limit

    def spend(self, amount: int, statement: Statement) -> None:
        self._left -= amount
        if self._left < 0:
            raise statement.refusal(f"the mapping comes to more than {self._limit} names and boxes", InvalidArgument)


def expand(
    statements: Sequence[Statement], sources: Mapping[str, Spec | None], targets: Iterable[str] | None, work: Work
) -> Iterator[Expansion]:
    """Each statement with its steps, in order. `targets` None: they are not known."""
    known = None if targets is None else Names(targets)
    return _Expander(Names(sources), known, Shapes(sources), work).run(statements)


class _Expander:
    def __init__(self, names: Names, targets: Names | None, shapes: Shapes, work: Work) -> None:
        self._names = names
        self._targets = targets
        self._shapes = shapes
        self._work = work

    def run(self, statements: Sequence[Statement]) -> Iterator[Expansion]:
        self._later = Later(statements, self._targets, self._work.spend)
        for number, statement in enumerate(statements):
            self._number = number
            if not statement.lefts:
                steps = self._additions(statement)
            elif not statement.rights:
                steps = self._removals(statement)
            else:
                steps = self._makings(statement)
                _check_made_once(statement, steps)
                for step in steps:
                    self._shapes.follow(statement, step)
                    for name in step.rights:
                        self._names.add(name)
            yield Expansion(statement, tuple(steps))

    def _additions(self, statement: Statement) -> list[Step]:
        steps = []
        for key in self._single(statement, statement.rights):
            if self._targets is None and (key.holes or statement.is_optional):
                continue  # where the targets are what is made, there are no others to keep
            found = [filled(key, "0")] if self._targets is None else [name for name, _ in self._targets.match(key)]
            if not found and not statement.is_optional:
                raise statement.refusal(
                    f"there is no target {key.pattern}{nearest(filled(key, '0'), self._targets or ())}", key=key
                )
            self._work.spend(len(found), statement)
            for name in found:
                self._names.discard(name)
                steps.append(Step((), (name,)))
        return steps

    def _removals(self, statement: Statement) -> list[Step]:
        names: dict[str, None] = {}
        for key in self._single(statement, statement.lefts):
            found = [name for name, _ in self._names.match(key)]
            self._work.spend(len(found) + 1, statement)
            if not found and not statement.is_optional:
                raise statement.refusal(
                    f"there is no {key.pattern} to remove{nearest(filled(key, '0'), self._names)}", key=key
                )
            names.update(dict.fromkeys(found))
        for name in names:
            self._names.discard(name)
        return [Step((name,), ()) for name in names]

    def _single(self, statement: Statement, keys: Iterable[Key]) -> list[Key]:
        """The keys with every array as its members."""
        self._work.spend(sum(key.count for key in keys), statement)
        return [single for key in keys for single in key.with_array()]

    def _makings(self, statement: Statement) -> list[Step]:
        lefts = self._single(statement, statement.lefts)
        rights = self._single(statement, statement.rights)
        return [self._step(statement, rights, row) for row in joined(statement, lefts, self._names, self._work.spend)]

    def _step(self, statement: Statement, keys: Sequence[Key], row: Row) -> Step:
        rights: list[str] = []
        turned: list[bool] = []
        for key in keys:
            names = self._right_names(statement, key, row)
            rights.extend(names)
            turned.extend([key.transposed] * len(names))
        self._work.spend(len(rights), statement)
        _check_parts(statement, len(row.names))
        return Step(row.names, tuple(rights), row.turned, tuple(turned))

    def _right_names(self, statement: Statement, key: Key, row: Row) -> list[str]:
        left_open = bound_key(key, row.ids)
        if left_open is None:
            known = ", ".join(f"${name} is {value}" for name, value in row.ids.items())
            raise statement.refusal(f"{known}: that gives no number for {key.pattern}")
        if not left_open.holes:
            return [filled(left_open, "")]
        if len({hole.name for hole in left_open.holes}) > 1:
            raise statement.refusal(f"of {left_open.pattern}, one hole at most can stand on the right only")
        count = statement.options.parts or self._slices(statement, left_open, row)
        if count is not None:
            self._work.spend(count, statement)
            return [filled(left_open, str(number)) for number in range(count)]
        return self._target_names(statement, left_open)

    def _slices(self, statement: Statement, key: Key, row: Row) -> int | None:
        """How many slices a tensor is unstacked to, if its shape tells and no target or later statement does."""
        if not statement.unstacks or len(statement.rights) > 1:
            return None
        shape = self._shapes.whole(statement, Step(row.names, (), row.turned))
        dim = None if shape is None else stack_dim(statement, len(shape))
        if shape is None or dim is None or (self._targets is not None and self._later.numbers(key, self._number)):
            return None
        return shape[dim]

    def _target_names(self, statement: Statement, key: Key) -> list[str]:
        if self._targets is None:
            raise statement.refusal(
                f"how many keys {key.pattern} stands for is known only where the targets are: add parts="
            )
        numbers = self._later.numbers(key, self._number)
        if not numbers:
            raise statement.refusal(
                f"no target matches {key.pattern}{nearest(filled(key, '0'), self._targets)}; if it is a temporary, "
                "add parts="
            )
        return [filled(key, number) for number in numbers]


def _check_parts(statement: Statement, count: int) -> None:
    """`parts=` beside a star on the left is a check."""
    parts = statement.options.parts
    if parts is not None and any(key.has_star for key in statement.lefts) and count != parts:
        raise statement.refusal(f"parts={parts}, but the left side stands for {count} keys")


def _check_made_once(statement: Statement, steps: Iterable[Step]) -> None:
    seen: set[str] = set()
    for step in steps:
        for name in step.rights:
            if name in seen:
                raise statement.refusal(
                    f"{name!r} would be made more than once; an id that stands on the left only does not collect "
                    f"keys: write {STAR} for it"
                )
            seen.add(name)
