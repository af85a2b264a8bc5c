"""Statements with ids for layers that are alike, in an order in which no statement meets the names of another.

An id stands for every number with which its left keys exist. So a statement with ids is written only if
its patterns match the keys of its components and no others, on both sides: the mapping is used in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.adapters.hub.hub_statements import Component, KeyParts, KeyStatement, key_parts, star_pattern, written
from holdfast.adapters.hub.traced_tensor import UntracedOperation
from holdfast.core.names import natural_key

_IDS = ("LAYER_ID", "EXPERT_ID", *(f"ID_{letter}" for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
_HIDDEN = "/first"  # ends a name that exists only within a mapping, where names are exchanged

# A key of a statement: texts, and between them numbers, ids or stars as they are written.
_Holes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Pattern:
    texts: tuple[str, ...]
    holes: _Holes

    def __str__(self) -> str:
        if not self.holes:
            return written(self.texts[0])
        if all(hole.isdigit() for hole in self.holes):
            return written("".join(_zipped(self.texts, self.holes)))
        return "".join(_zipped(self.texts, tuple(map(_written_hole, self.holes, self.texts[1:]))))

    def regex(self) -> re.Pattern[str]:
        """Return the expression that matches the keys for which the pattern stands."""
        seen: set[str] = set()
        holes = []
        for hole in self.holes:
            name = hole.removeprefix("$")
            if hole == "*":
                holes.append("[0-9]+")
            elif not hole.startswith("$"):
                holes.append(hole)
            elif name in seen:
                holes.append(f"(?P={name})")
            else:
                seen.add(name)
                holes.append(f"(?P<{name}>[0-9]+)")
        return re.compile("".join(_zipped([re.escape(text) for text in self.texts], holes)))


def _zipped(texts: Sequence[str], holes: Sequence[str]) -> Iterator[str]:
    for text, hole in zip(texts, (*holes, ""), strict=True):
        yield text
        yield hole


def _written_hole(hole: str, following: str) -> str:
    if hole.startswith("$") and re.match("[A-Z0-9_]", following):
        return "${" + hole[1:] + "}"
    return hole


@dataclass(slots=True, eq=False)
class _Block:
    """Components that are written as one: the patterns at both ends, and the lines of their statements."""

    members: list[Component]
    lefts: list[_Pattern]
    rights: list[_Pattern]
    lines: list[str]

    @property
    def sources(self) -> list[str]:
        return [key for member in self.members for key in member.sources]

    @property
    def targets(self) -> list[str]:
        return [key for member in self.members for key in member.targets]


def mapping_text(found: Sequence[Component], sources: Iterable[str], targets: Iterable[str]) -> str:
    """Return the statements of components as text. `sources` and `targets` are all keys of either side."""
    keys = _Keys(sources, targets)
    blocks: list[_Block] = []
    for members in _alike(found):
        block = _block(members)
        if block is not None and keys.is_exact(block):
            blocks.append(block)
        else:
            blocks += [_single(member) for member in members]
    blocks.sort(key=lambda block: natural_key(block.members[0].sources[0]))
    try:
        ordered = _ordered(blocks)
    except UntracedOperation:
        ordered = _exchanged([_single(member) for member in found])
    return "".join(f"{line}\n" for block in ordered for line in block.lines)


class _Keys:
    """All keys of both sides, searched by pattern."""

    def __init__(self, sources: Iterable[str], targets: Iterable[str]) -> None:
        self.sources = _by_texts(sources)
        self.targets = _by_texts(targets)

    def is_exact(self, block: _Block) -> bool:
        """Return True if the patterns of a block match its keys only."""
        return self._matched(block.lefts, self.sources) == set(block.sources) and self._matched(
            block.rights, self.targets
        ) == set(block.targets)

    @staticmethod
    def _matched(patterns: Iterable[_Pattern], keys: Mapping[tuple[str, ...], Sequence[str]]) -> set[str]:
        out: set[str] = set()
        for pattern in patterns:
            regex = pattern.regex()
            out.update(key for key in keys.get(pattern.texts, ()) if regex.fullmatch(key))
        return out


def _by_texts(keys: Iterable[str]) -> dict[tuple[str, ...], list[str]]:
    out: dict[tuple[str, ...], list[str]] = {}
    for key in keys:
        out.setdefault(key_parts(key).texts, []).append(key)
    return out


def _alike(found: Sequence[Component]) -> list[list[Component]]:
    """Return the components grouped by their form: the same statements but for numbers in keys."""
    groups: dict[object, list[Component]] = {}
    for component in found:
        form = tuple((step.options, step.starred, tuple(p.texts for p in _parts(step))) for step in component.steps)
        groups.setdefault(form, []).append(component)
    return list(groups.values())


def _sides(step: KeyStatement) -> list[tuple[list[KeyParts], int | None, int]]:
    """Return for both sides the keys that are written, the position of a star, and the number of keys."""
    out: list[tuple[list[KeyParts], int | None, int]] = []
    for side, keys in (("lefts", step.lefts), ("rights", step.rights)):
        star = star_pattern(keys) if step.starred == side else None
        if star is None:
            out.append(([key_parts(key) for key in keys], None, len(keys)))
        else:
            out.append(([star[0]], star[1], len(keys)))
    return out


def _parts(step: KeyStatement) -> Iterator[KeyParts]:
    for keys, _, count in _sides(step):
        yield from keys
        yield KeyParts((str(count),), ())


def _block(members: list[Component]) -> _Block | None:
    """Write components of one form as one block; None if the numbers on the right are not those on the left."""
    if len(members) == 1:
        return _single(members[0])
    sides = [[side for step in member.steps for side in _sides(step)] for member in members]
    vectors: dict[tuple[int, int, int], tuple[str, ...]] = {}
    for number, (keys, star, _) in enumerate(sides[0]):
        for at, key in enumerate(keys):
            for place in range(len(key.numbers)):
                if place != star:
                    vectors[number, at, place] = tuple(side[number][0][at].numbers[place] for side in sides)
    ids: dict[tuple[str, ...], str] = {}
    for name, vector in vectors.items():
        if len(set(vector)) > 1 and vector not in ids:
            if name[0] % 2 or len(ids) == len(_IDS):
                return None  # the number first appears on the right, so nothing on the left says what it is
            ids[vector] = f"${_IDS[len(ids)]}"

    def pattern(number: int, at: int, key: KeyParts, star: int | None) -> _Pattern:
        holes = []
        for place, literal in enumerate(key.numbers):
            vector = vectors.get((number, at, place), ())
            holes.append("*" if place == star else ids.get(vector, literal))
        return _Pattern(key.texts, tuple(holes))

    patterns = [
        [pattern(number, at, key, star) for at, key in enumerate(keys)]
        for number, (keys, star, _) in enumerate(sides[0])
    ]
    return _written_block(members, patterns)


def _single(member: Component) -> _Block:
    patterns = []
    for keys, star, _ in (side for step in member.steps for side in _sides(step)):
        patterns.append(
            [_Pattern(k.texts, tuple("*" if at == star else n for at, n in enumerate(k.numbers))) for k in keys]
        )
    return _written_block([member], patterns)


def _written_block(members: list[Component], patterns: Sequence[Sequence[_Pattern]]) -> _Block:
    sources, targets = set(members[0].sources), set(members[0].targets)
    lefts: list[_Pattern] = []
    rights: list[_Pattern] = []
    lines = []
    for number, step in enumerate(members[0].steps):
        left, right = patterns[2 * number], patterns[2 * number + 1]
        if not sources.isdisjoint(step.lefts):
            lefts += [p for p, key in zip(left, step.lefts, strict=False) if key in sources]
        if not targets.isdisjoint(step.rights):
            rights += [p for p, key in zip(right, step.rights, strict=False) if key in targets]
        count = f", parts={len(getattr(step, step.starred))}" if step.starred else ""
        options = f", {step.options}{count}" if step.options else ""
        lines.append(f"{', '.join(map(str, left))} -> {', '.join(map(str, right))}{options}")
    return _Block(members, lefts, rights, lines)


def _ordered(blocks: Sequence[_Block]) -> list[_Block]:
    """Return the blocks in an order in which none finds names of others, forwards or backwards.

    A name that is both a source and a target is read before it is made. Raises UntracedOperation if no order will do.
    """
    reading = _owners(blocks, "lefts", "targets")
    making = _owners(blocks, "rights", "sources")
    after: dict[int, set[int]] = {at: set() for at in range(len(blocks))}  # by block: those that come before it
    for reader, maker in reading:
        after[maker].add(reader)
    for maker, reader in making:
        after[maker].add(reader)
    out: list[_Block] = []
    placed: set[int] = set()
    while len(out) < len(blocks):
        free = [at for at in after if at not in placed and after[at] <= placed]
        if not free:
            raise UntracedOperation("names that are exchanged")
        for at in free:
            placed.add(at)
            out.append(blocks[at])
    return out


def _owners(blocks: Sequence[_Block], patterns: str, names: str) -> Iterator[tuple[int, int]]:
    """Yield pairs of blocks: a pattern of the first matches a name of the second."""
    owner = {key: at for at, block in enumerate(blocks) for key in getattr(block, names)}
    by_texts = _by_texts(owner)
    for at, block in enumerate(blocks):
        for pattern in getattr(block, patterns):
            candidates = by_texts.get(pattern.texts)
            if not candidates:
                continue
            regex = pattern.regex()
            yield from ((at, owner[key]) for key in candidates if regex.fullmatch(key) and owner[key] != at)


def _exchanged(blocks: Sequence[_Block]) -> list[_Block]:
    """Return blocks in order whose renames go by hidden names, where a target is also a source."""
    sources = {key for block in blocks for key in block.sources}
    first: list[_Block] = []
    between: list[_Block] = []
    last: list[_Block] = []
    for block in blocks:
        (member,) = block.members
        target = member.targets[0]
        if len(member.steps) > 1 or member.steps[0].options or target not in sources:
            between.append(block)
            continue
        hidden = target + _HIDDEN
        first.append(_single(replace_ends(member, member.sources, [hidden])))
        last.append(_single(replace_ends(member, [hidden], [target])))
    return [*first, *_ordered(between), *last]


def replace_ends(member: Component, sources: list[str], targets: list[str]) -> Component:
    """Return a rename between other keys."""
    return Component(sources, targets, [replace(member.steps[0], lefts=tuple(sources), rights=tuple(targets))])
