"""Statements of the mapping language from traced operations, written with ids and stars where these are exact."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.adapters.hub.traced_tensor import Operation, TracedValue, UntracedOperation
from holdfast.core.names import natural_key

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_./-]+")


@dataclass(frozen=True, slots=True)
class KeyStatement:
    """One statement with whole keys. `stars` is the side on which the keys are written as one with a star."""

    lefts: tuple[str, ...]
    rights: tuple[str, ...]
    options: str = ""
    starred: str = ""  # "lefts" or "rights": keys that are numbered from 0


@dataclass(slots=True, eq=False)
class Component:
    """Operations that belong together: the keys they begin and end with, and their statements in order."""

    sources: list[str]
    targets: list[str]
    steps: list[KeyStatement] = field(default_factory=list)


def components(outputs: Mapping[str, TracedValue]) -> list[Component]:
    """Return the components of traced outputs; a key that stays as it is has none.

    Raises UntracedOperation if a part of a tensor is not used, or used twice: no mapping back exists then.
    """
    out = []
    for targets in _connected(outputs):
        made = {target: outputs[target] for target in targets}
        component = _component(made)
        if component is not None:
            out.append(component)
    return sorted(out, key=lambda component: natural_key(component.sources[0]))


def _connected(outputs: Mapping[str, TracedValue]) -> Iterator[list[str]]:
    """Yield the targets of each component."""
    root: dict[int, int] = {}

    def find(number: int) -> int:
        while root.setdefault(number, number) != number:
            root[number] = root[root[number]]
            number = root[number]
        return number

    done: set[int] = set()
    for value in outputs.values():
        pending = [value.operation]
        while pending:
            operation = pending.pop()
            if id(operation) in done:
                continue
            done.add(id(operation))
            for source in operation.inputs:
                root[find(id(source.operation))] = find(id(operation))
                pending.append(source.operation)
    members: dict[int, list[str]] = {}
    for target, value in outputs.items():
        members.setdefault(find(id(value.operation)), []).append(target)
    yield from members.values()


def _component(outputs: Mapping[str, TracedValue]) -> Component | None:
    operations = _in_order(outputs)
    sources = [operation.key for operation in operations if operation.kind == "source"]
    names: dict[tuple[int, int], str] = {}
    steps: list[KeyStatement] = []
    for target, value in outputs.items():
        name = (id(value.operation), value.index)
        if name in names:
            raise UntracedOperation(f"two names, {names[name]} and {target}, for one tensor")
        names[name] = target
        if value.operation.kind == "source":
            if len(outputs) > 1:
                raise UntracedOperation(f"two names, {' and '.join(list(outputs)[:2])}, for one tensor")
            if target == value.operation.key:
                return None
            return Component(sources, list(outputs), [KeyStatement((value.operation.key,), (target,))])
    uses: set[tuple[int, int]] = set(names)
    parts = 0
    for operation in operations:
        if operation.kind == "source":
            names[id(operation), 0] = operation.key
            continue
        lefts = [_used(names, uses, value) for value in operation.inputs]
        count = len(operation.numbers) if operation.kind == "split" else 1
        count = operation.numbers[0] if operation.kind == "unstack" else count
        rights = []
        for index in range(count):
            if (id(operation), index) not in names:
                names[id(operation), index] = f"{sources[0]}/part{parts}"
                parts += 1
            rights.append(names[id(operation), index])
        steps.append(_step(operation, lefts, rights))
    unused = [name for value, name in names.items() if value not in uses]
    if unused:
        raise UntracedOperation(f"a part of {sources[0]} that is left out")
    return Component(sources, list(outputs), steps)


def _used(names: Mapping[tuple[int, int], str], uses: set[tuple[int, int]], value: TracedValue) -> str:
    name = (id(value.operation), value.index)
    if name in uses:
        raise UntracedOperation(f"a tensor that is used twice, {names[name]}")
    uses.add(name)
    return names[name]


def _in_order(outputs: Mapping[str, TracedValue]) -> list[Operation]:
    """Return the operations that make the outputs, each after those that it needs."""
    out: list[Operation] = []
    done: set[int] = set()

    def visit(operation: Operation) -> None:
        if id(operation) in done:
            return
        done.add(id(operation))
        for value in operation.inputs:
            visit(value.operation)
        out.append(operation)

    for value in outputs.values():
        visit(value.operation)
    return out


def _step(operation: Operation, lefts: Sequence[str], rights: Sequence[str]) -> KeyStatement:
    kind, numbers = operation.kind, list(operation.numbers)
    if kind in ("split", "cat"):
        sizes = "" if len(set(numbers)) == 1 else f", sizes={numbers}"
        if kind == "cat" and not sizes:
            sizes = ", sizes=equal"
        return KeyStatement(tuple(lefts), tuple(rights), f"axis={operation.axis}{sizes}")
    if kind in ("stack", "unstack"):
        many = lefts if kind == "stack" else rights
        starred = ("lefts" if kind == "stack" else "rights") if star_pattern(many) else ""
        return KeyStatement(tuple(lefts), tuple(rights), f"axis={operation.axis}, {kind}", starred)
    if kind == "permute":
        return KeyStatement(tuple(lefts), tuple(rights), f"permute={numbers}")
    before = list(operation.inputs[0].shape)
    return KeyStatement(tuple(lefts), tuple(rights), f"reshape={numbers}, src_shape={before}")


# Keys cut into texts and numbers.


@dataclass(frozen=True, slots=True)
class KeyParts:
    """A key as its texts and the numbers between them; numbers with leading zeros count as text."""

    texts: tuple[str, ...]
    numbers: tuple[str, ...]


def key_parts(key: str) -> KeyParts:
    """Cut a key into texts and numbers; a key that must be quoted has no numbers."""
    if not _PLAIN_KEY.fullmatch(key):
        return KeyParts((key,), ())
    pieces = re.split(r"(?<![0-9])(0|[1-9][0-9]*)(?![0-9])", key)
    return KeyParts(tuple(pieces[::2]), tuple(pieces[1::2]))


def star_pattern(keys: Sequence[str]) -> tuple[KeyParts, int] | None:
    """Return the parts of the first key and the position of the number, if the keys count from 0 in one place."""
    parts = [key_parts(key) for key in keys]
    first = parts[0]
    if len(keys) < 2 or any(part.texts != first.texts for part in parts):
        return None
    varying = [at for at, number in enumerate(first.numbers) if any(part.numbers[at] != number for part in parts)]
    if len(varying) != 1 or [part.numbers[varying[0]] for part in parts] != [str(at) for at in range(len(keys))]:
        return None
    return first, varying[0]


def written(key: str) -> str:
    """Return a key as it is written in a statement, without holes."""
    if _PLAIN_KEY.fullmatch(key) and not key.startswith("-") and "->" not in key:
        return key if "/" in key or "." in key else f'"{key}"'
    return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'
