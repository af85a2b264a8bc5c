"""Mutated programs: changes of the tree and of the bytes of program.json, by a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: list[Any] = [
    None, True, -1, 0, 2**63, 2**200, 1.5, "", "x", "__import__('os').system('true')", "aten.from_file.default",
    "torch.os.system", "../../etc/passwd", "__class__", [], {}, [[]], {"$": "x"}, {"$": "__globals__"},
    {"$float": "nan"},    {"$dtype": "object"}, {"$eval": "1"}, ["pow", 10, 10**9], ["mul", 2**62, 2**62], "a" * 5000,
]  # fmt: skip


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container of a tree with each of its keys or positions."""
    found, open_ = [], [tree]
    while open_:
        item = open_.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ()
        for key in keys:
            found.append((item, key))
            if isinstance(item[key], dict | list):
                open_.append(item[key])
    return found


def mutate(tree: Any, choice: random.Random) -> Any:
    """Return a copy with one to three changes: a value replaced, deleted, doubled, renamed or swapped."""
    tree = copy.deepcopy(tree)
    for _ in range(choice.randint(1, 3)):
        places = _places(tree)
        if not places:
            return tree
        holder, key = choice.choice(places)
        kind = choice.randrange(5)
        if kind == 0:
            holder[key] = copy.deepcopy(choice.choice(ODD))
        elif kind == 1:
            del holder[key]
        elif kind == 2:
            other, place = choice.choice(places)
            holder[key] = copy.deepcopy(
                other.get(place) if isinstance(other, dict) else other[place % len(other)] if other else None
            )
        elif kind == 3 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 3:
            holder[str(choice.choice(ODD))[:80]] = holder.pop(key)
        else:
            holder[key] = _nested(choice.randint(1, 200))
    return tree


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def mutated_files(tree: Any, count: int, seed: int) -> Iterator[bytes]:
    """Yield mutated files: three in four changed as trees, one in four as bytes."""
    choice = random.Random(seed)
    plain = json.dumps(tree).encode()
    for number in range(count):
        if number % 4:
            yield json.dumps(mutate(tree, choice)).encode()
        else:
            data = bytearray(plain)
            for _ in range(choice.randint(1, 8)):
                data[choice.randrange(len(data))] = choice.randrange(256)
            yield bytes(data[: choice.randrange(len(data))] if choice.randrange(8) == 0 else data)
