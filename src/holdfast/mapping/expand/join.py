"""The natural join of a statement's left keys: every combination of ids for which all keys exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.mapping.expand.name_index import NameIndex, nearest
from holdfast.mapping.syntax.statement import STAR, Hole, Key, Statement

Values = tuple[str, ...]
Spend = Callable[[int, Statement], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One combination: its ids and the names of the left keys."""

    ids: dict[str, str]
    names: tuple[str, ...]
    transposed: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class _Relation:
    """The matches of one key: the names for each combination of its ids, in numeric order of the star."""

    key: Key
    ids: tuple[str, ...]
    rows: dict[Values, list[tuple[int, str]]] = field(default_factory=dict)

    def at(self, ids: dict[str, str]) -> list[str]:
        return [name for _, name in sorted(self.rows[tuple(ids[name] for name in self.ids)])]


def joined(statement: Statement, keys: Sequence[Key], names: NameIndex, spend: Spend) -> list[Row]:
    """Return the combinations in numeric order. Raises if a key is missing in one or nothing matches."""
    relations = [_relation(statement, key, names, spend) for key in keys]
    if not any(relation.rows for relation in relations):
        if statement.is_optional:
            return []
        patterns = ", ".join(dict.fromkeys(key.pattern for key in keys[:4]))
        hint = nearest("".join("0" if isinstance(p, Hole) else p for p in keys[0].pieces), names)
        advice = "" if statement.builtin else "; if that is expected, add optional"  # nobody edits a built-in mapping
        raise statement.error(f"no key matches {patterns}{hint}{advice}", key=keys[0])
    ids, rows = _join(statement, relations, spend)
    _check_complete(statement, relations, ids, rows)
    transposed = [key.transposed for key in keys]
    out = []
    for row in sorted(rows, key=lambda values: [(int(value), value) for value in values]):
        values = dict(zip(ids, row, strict=True))
        found = [relation.at(values) for relation in relations]
        spend(sum(map(len, found)), statement)
        marks = tuple(mark for mark, some in zip(transposed, found, strict=True) for _ in some)
        out.append(Row(values, tuple(name for some in found for name in some), marks))
    return out


def _relation(statement: Statement, key: Key, names: NameIndex, spend: Spend) -> _Relation:
    ids = tuple(dict.fromkeys(hole.name for hole in key.holes if hole.name != STAR))
    relation = _Relation(key, ids)
    for name, values in names.match(key):
        spend(1, statement)
        row = relation.rows.setdefault(tuple(values[name] for name in ids), [])
        row.append((int(values.get(STAR, "0")), name))
    return relation


def _join(
    statement: Statement, relations: Iterable[_Relation], spend: Spend
) -> tuple[tuple[str, ...], Iterable[Values]]:
    """Return all ids and the combinations that every relation has."""
    waiting = sorted(relations, key=lambda relation: -len(relation.ids))
    ids, rows = waiting[0].ids, list(waiting[0].rows)
    for relation in waiting[1:]:
        common = [name for name in relation.ids if name in ids]
        fresh = [name for name in relation.ids if name not in ids]
        if fresh and not common and ids:
            raise statement.error(
                f"the ids of {relation.key.pattern} have nothing in common with ${', $'.join(ids)}: "
                "left keys are joined by the ids that they share"
            )
        by_common: dict[Values, list[Values]] = {}
        for values in relation.rows:
            row = dict(zip(relation.ids, values, strict=True))
            by_common.setdefault(tuple(row[n] for n in common), []).append(tuple(row[n] for n in fresh))
        places = [ids.index(name) for name in common]
        out: list[Values] = []
        for values in rows:
            found = by_common.get(tuple(values[at] for at in places), ())
            spend(len(found), statement)
            out.extend(values + more for more in found)
        ids, rows = (*ids, *fresh), out
    return ids, rows


def _check_complete(
    statement: Statement, relations: Sequence[_Relation], ids: tuple[str, ...], rows: Iterable[Values]
) -> None:
    """Check that every match of every key is part of a combination."""
    for relation in relations:
        places = [ids.index(name) for name in relation.ids]
        used = {tuple(values[at] for at in places) for values in rows}
        for values in relation.rows:
            if values not in used:
                bound = dict(zip(relation.ids, values, strict=True))
                missing = [_bound(other.key, bound) for other in relations if not _fits(other, bound)]
                there = sorted(relation.rows[values])[0][1]
                raise statement.error(
                    f"{there!r} exists, but not {', '.join(missing[:4]) or 'its counterpart'}: the left keys of "
                    "a statement must exist together or not at all"
                )


def _fits(relation: _Relation, bound: dict[str, str]) -> bool:
    common = [at for at, name in enumerate(relation.ids) if name in bound]
    wanted = [bound[relation.ids[at]] for at in common]
    return any([values[at] for at in common] == wanted for values in relation.rows)


def _bound(key: Key, bound: dict[str, str]) -> str:
    """Return the key with the known ids filled in."""
    pieces: list[str | Hole] = []
    for piece in key.pieces:
        known = isinstance(piece, Hole) and piece.name in bound
        pieces.append(str(int(bound[piece.name]) + piece.offset) if isinstance(piece, Hole) and known else piece)
    return Key(tuple(pieces)).pattern
