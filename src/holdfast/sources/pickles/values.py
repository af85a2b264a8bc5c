"""Types of unpickled values: names, byte spans in the file, encoded bytes, records, and builders of records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """The name of a class or function in a pickle. It is only text; nothing is imported."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A byte string or long text that stays in the file, given by offset and size in bytes.

    Short byte strings also have their `data`.
    """

    offset: int
    size: int
    text: bool = False
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A byte string that the file stores as text, one Latin-1 character per byte."""

    text: FileSpan


@dataclass(slots=True, eq=False)
class Record:
    """An object of a named class: its constructor arguments and its state."""

    name: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The state of an ordinary object, by attribute name."""
        return self.state if isinstance(self.state, dict) else {}


Builder = Callable[[tuple[Any, ...]], object]
Names = Mapping[tuple[str, str], Builder | None]  # None: the name is allowed but never called


def record_of(module: str, name: str) -> Builder:
    """Return a builder that keeps its arguments in a record."""
    token = Name(module, name)
    return lambda arguments: Record(token, arguments)


def records(module: str, *names: str) -> dict[tuple[str, str], Builder | None]:
    """Map names of one module to builders of records."""
    return {(module, name): record_of(module, name) for name in names}
