"""The line of a config file that has the setting an error names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.core.errors import InvalidArgument

_NAMED = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)(?:\[(\d+)\])?[. ]([a-z_]+)")  # section.key, section[0].key, section key
_HEADER = re.compile(r"\s*\[\[?\s*([\w.]+)\s*\]")
_KEY = re.compile(r"\s*(\w+)\s*=")

Place = tuple[str, int, str]  # a section, its number among those of its name, and a key


@contextmanager
def named_place(path: str | Path) -> Iterator[None]:
    """Put the config file in front of an InvalidArgument, and the line of the setting that it names, if it has one."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}{_line(Path(path), str(error))}: {error}") from error.__cause__


def _line(path: Path, message: str) -> str:
    places = _places(path.read_text(encoding="utf-8"))
    for section, number, key in _NAMED.findall(message):
        if (place := (section, int(number or 0), key)) in places:
            return f":{places[place]}"
    return ""


def _places(text: str) -> dict[Place, int]:
    """Return the line of each setting."""
    found: dict[Place, int] = {}
    seen: Counter[str] = Counter()
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            section = header[1]
            seen[section] += 1
        elif key := _KEY.match(line):
            found.setdefault((section, max(seen[section] - 1, 0), key[1]), number)
    return found
