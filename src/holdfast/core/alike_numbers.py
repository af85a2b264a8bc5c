"""Names that are numbers and count up, such as layers and experts, folded into one entry where they are alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import groupby
from typing import TypeVar

T = TypeVar("T")


def folded_numbers(
    items: Iterable[tuple[str, T]], look: Callable[[T], Hashable], *, unfold: bool = False
) -> Iterator[tuple[list[str], T]]:
    """Yield the names of each entry with its first item. Numbers in a row whose items look alike are one entry."""

    def entry_key(member: tuple[int, tuple[str, T]]) -> Hashable:
        position, (name, item) = member
        if unfold or not (name.isascii() and name.isdigit() and len(name) < 19):
            return position
        return (int(name) - position, look(item))

    for _, members in groupby(enumerate(items), entry_key):
        found = [member for _, member in members]
        yield [name for name, _ in found], found[0][1]
