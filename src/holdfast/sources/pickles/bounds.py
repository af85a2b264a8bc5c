"""Check that an unpickled value can be traversed: no cycles, limited depth and a limited number of visits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged
from holdfast.sources.pickles.values import Record

DEPTH = limits.JSON_DEPTH
_ALWAYS = 1_000_000
_FACTOR = 16
_CONTAINERS = (list, tuple, dict, set, frozenset, Record)


def check_traversal(value: Any, operations: int, where: str) -> None:
    """Raise Damaged unless a traversal of the value ends within bounds.

    A few shared lists nested in one another take little memory but endless time to traverse. The count
    is of visits, at most a multiple of the operations that built the value.
    """
    if not isinstance(value, _CONTAINERS):
        return
    most = _ALWAYS + _FACTOR * operations
    seen: dict[int, tuple[int, int]] = {}  # depth and number of visits of each container
    open_ids = {id(value)}
    path: list[list[Any]] = [[value, _inner(value), 1, 1]]  # the container, its remaining items, depth and count
    while path:
        node = path[-1]
        below = next(node[1], None)
        if below is None:
            path.pop()
            open_ids.discard(id(node[0]))
            seen[id(node[0])] = (node[2], node[3])
            if path:
                _add(path[-1], node[2], node[3], most, where)
            continue
        if id(below) in open_ids:
            raise Damaged(f"{where}: the pickle has a {type(below).__name__} that contains itself")
        known = seen.get(id(below))
        if known is not None:
            _add(node, *known, most, where)
            continue
        if len(path) >= DEPTH:
            raise Damaged(f"{where}: the pickle is nested deeper than {DEPTH}")
        if not isinstance(below, Record) and not any(isinstance(item, _CONTAINERS) for item in _items(below)):
            seen[id(below)] = (1, 1)
            _add(node, 1, 1, most, where)
            continue
        open_ids.add(id(below))
        path.append([below, _inner(below), 1, 1])


def _add(node: list[Any], depth: int, count: int, most: int, where: str) -> None:
    node[2] = max(node[2], depth + 1)
    node[3] += count
    if node[2] > DEPTH:
        raise Damaged(f"{where}: the pickle is nested deeper than {DEPTH}")
    if node[3] > most:
        raise Damaged(f"{where}: the pickle repeats shared values more than {most} times")


def _inner(value: Any) -> Iterator[Any]:
    return (item for item in _items(value) if isinstance(item, _CONTAINERS))


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        return _both(value)
    if isinstance(value, Record):
        return iter((value.arguments, value.state))
    items: Iterator[Any] = iter(value)
    return items


def _both(value: dict[Any, Any]) -> Iterator[Any]:
    yield from value.keys()
    yield from value.values()
