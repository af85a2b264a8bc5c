"""Which mapping is for which group: what users give, as programs by the name of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.mapping import families
from holdfast.mapping.program import Mapping as Program

MappingLike = Program | str | os.PathLike[str] | Sequence[str]


@dataclass(frozen=True, slots=True)
class Around:
    """What is known around a module, which mappings that are called by name look at.

    The config.json of the model, and the keys on both sides of the program, as far as they are known.
    """

    config: Mapping[str, Any] | None = None
    sources: Collection[str] | None = None
    targets: Collection[str] | None = None


def programs(
    given: Any, modules: Sequence[str], around: Callable[[str], Around], *, reverse: bool = False
) -> dict[str, Program]:
    """Programs by module. What is given is one program, for "model" or the only module, or a dict by module.

    `reverse` turns them round: what was saved through a mapping is loaded through its reverse.
    """
    found = _given(given, modules, around)
    return {name: program.reverse() for name, program in found.items()} if reverse else found


def _given(given: Any, modules: Sequence[str], around: Callable[[str], Around]) -> dict[str, Program]:
    if isinstance(given, Mapping) and "aoa_statements" not in given:
        unknown = [name for name in given if name not in modules]
        if unknown:
            raise InvalidArgument(f"mapping= is for {unknown[0]!r}, and the modules are {', '.join(modules) or 'none'}")
        return {name: parsed(program, around(name)) for name, program in given.items()}
    if "model" in modules:
        module = "model"
    elif len(modules) == 1:
        module = modules[0]
    else:
        found = ", ".join(modules) or "none"
        raise InvalidArgument(f"mapping= is for one module, and there are {found}; give a dict of mappings by name")
    return {module: parsed(given, around(module))}


def check_given(given: Any, *, reversible: bool = False) -> None:
    """Raise InvalidArgument for what is no mapping, before any state is seen; NotFound for a missing file.

    One that is called by name is only looked up: it may need a config.json. `reversible` asks for
    one that has a reverse.
    """
    by_module = isinstance(given, Mapping) and "aoa_statements" not in given
    for program in given.values() if by_module else [given]:
        if isinstance(program, str) and families.is_name(program):
            continue
        found = Program.parse(program)
        if reversible:
            found.reverse()


def parsed(given: Any, around: Around) -> Program:
    """A program as it was written; one that is called by name as it is for this model."""
    back = isinstance(given, str) and families.is_back(given)
    return Program.parse(given, around.config, around.targets if back else around.sources)
