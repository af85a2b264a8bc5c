"""Expanding a program: ids, stars and arrays become the keys that there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.mapping.expansion import Expansion, Step
from holdfast.mapping.join import Row, joined
from holdfast.mapping.names import Names, moved, nearest
from holdfast.mapping.shapes import Shapes, stack_dim
from holdfast.mapping.values import STAR, Hole, Key, Spec, Statement


class Work:
    """Counts what a mapping comes to, so that a short program cannot ask for endless work."""

    def __init__(self, limit: int = limits.MAPPING_WORK) -> None:
        self._left = self._limit = limit

    def spend(self, amount: int, statement: Statement) -> None:
        self._left -= amount
        if self._left < 0:
            raise statement.refusal(f"the mapping comes to more than {self._limit} names and boxes", InvalidArgument)


def expand(
    statements: Iterable[Statement], sources: Mapping[str, Spec | None], targets: Iterable[str] | None, work: Work
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

    def run(self, statements: Iterable[Statement]) -> Iterator[Expansion]:
        for statement in statements:
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
        for key in _keys(statement.rights):
            if self._targets is None and key.holes:
                continue  # where the targets are what is made, there are no others to keep
            found = [_literal(key)] if self._targets is None else [name for name, _ in self._targets.match(key)]
            if not found and not statement.options.optional:
                raise statement.refusal(
                    f"there is no target {key.pattern}{nearest(_literal(key), self._targets or ())}"
                )
            self._work.spend(len(found), statement)
            for name in found:
                self._names.discard(name)
                steps.append(Step((), (name,)))
        return steps

    def _removals(self, statement: Statement) -> list[Step]:
        names: dict[str, None] = {}
        for key in _keys(statement.lefts):
            found = [name for name, _ in self._names.match(key)]
            self._work.spend(len(found) + 1, statement)
            if not found and not statement.options.optional:
                raise statement.refusal(f"there is no {key.pattern} to remove{nearest(_literal(key), self._names)}")
            names.update(dict.fromkeys(found))
        for name in names:
            self._names.discard(name)
        return [Step((name,), ()) for name in names]

    def _makings(self, statement: Statement) -> list[Step]:
        lefts = _keys(statement.lefts)
        rights = _keys(statement.rights)
        self._work.spend(len(lefts) + len(rights), statement)
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
        ids = row.ids
        pieces: list[str | Hole] = []
        for piece in key.pieces:
            if isinstance(piece, Hole) and piece.name in ids:
                digits = moved(ids[piece.name], piece.offset)
                if digits is None:
                    raise statement.refusal(
                        f"${piece.name} is {ids[piece.name]}: {piece.offset:+} from it is no number"
                    )
                pieces.append(digits)
            else:
                pieces.append(piece)
        left_open = Key(tuple(pieces))
        if not left_open.holes:
            return [_literal(left_open)]
        if len({hole.name for hole in left_open.holes}) > 1:
            raise statement.refusal(f"of {left_open.pattern}, one hole at most can stand on the right only")
        if statement.unstacks and self._targets is not None and any(self._targets.match(left_open)):
            return self._target_names(statement, left_open)
        count = self._slices(statement, row) or statement.options.parts
        if count is not None:
            self._work.spend(count, statement)
            return [_filled(left_open, number) for number in range(count)]
        return self._target_names(statement, left_open)

    def _slices(self, statement: Statement, row: Row) -> int | None:
        """How many slices there are to name where a tensor of known shape is unstacked to one open key."""
        if not statement.unstacks or len(statement.rights) > 1:
            return None
        shape = self._shapes.whole(statement, Step(row.names, (), row.turned))
        dim = None if shape is None else stack_dim(statement, len(shape))
        return None if shape is None or dim is None else shape[dim]

    def _target_names(self, statement: Statement, key: Key) -> list[str]:
        if self._targets is None:
            raise statement.refusal(
                f"how many keys {key.pattern} stands for is known only where the targets are: add parts="
            )
        found = sorted((int(next(iter(values.values()))), name) for name, values in self._targets.match(key))
        if not found:
            raise statement.refusal(f"no target matches {key.pattern}{nearest(_literal(key), self._targets)}")
        return [name for _, name in found]


def _keys(keys: Iterable[Key]) -> list[Key]:
    return [single for key in keys for single in key.with_array()]


def _literal(key: Key) -> str:
    return "".join("0" if isinstance(piece, Hole) else piece for piece in key.pieces)


def _filled(key: Key, number: int) -> str:
    return "".join(str(max(number + piece.offset, 0)) if isinstance(piece, Hole) else piece for piece in key.pieces)


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
