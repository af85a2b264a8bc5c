"""What a pickle may hold once it is read: plain values, and inert stand-ins for all that is not plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A name of a class or function in a pickle. It is a text: nothing is imported for it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Span:
    """A byte string, or a long text, that stays in the file: its offset and its size in bytes.

    Short byte strings are here too, as `data`.
    """

    offset: int
    size: int
    text: bool = False
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A byte string that the file holds as a text, each byte one character of Latin 1."""

    text: Span


@dataclass(slots=True, eq=False)
class Record:
    """An object of a named class: what it would be made from, and the state that it would be given."""

    name: Name
    arguments: tuple[Any, ...] = ()
    state: Any = None

    @property
    def fields(self) -> dict[str, Any]:
        """The state of an ordinary object, by the names of its attributes."""
        return self.state if isinstance(self.state, dict) else {}


Builder = Callable[[tuple[Any, ...]], object]
Names = Mapping[tuple[str, str], Builder | None]  # None: the name may stand there, and is never called


def record_of(module: str, name: str) -> Builder:
    """A builder that keeps its arguments in a record."""
    token = Name(module, name)
    return lambda arguments: Record(token, arguments)


def records(module: str, *names: str) -> dict[tuple[str, str], Builder | None]:
    """Names of one module that become records."""
    return {(module, name): record_of(module, name) for name in names}
