"""Which mapping is for which group: what users give, as programs by the name of a module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.language import Mapping as Program

Config = Mapping[str, Any]
MappingLike = Program | str | os.PathLike[str] | Sequence[str]


def programs(
    given: Any,
    modules: Sequence[str],
    config_of: Callable[[str], Config | None] = lambda module: None,
    *,
    reverse: bool = False,
) -> dict[str, Program]:
    """Programs by module. What is given is one program, for "model" or the only module, or a dict by module.

    `config_of` gives the config.json of a module, which mappings that are called by name look at.
    `reverse` turns them round: what was saved through a mapping is loaded through its reverse.
    """
    found = _given(given, modules, config_of)
    return {name: program.reverse() for name, program in found.items()} if reverse else found


def _given(given: Any, modules: Sequence[str], config_of: Callable[[str], Config | None]) -> dict[str, Program]:
    if isinstance(given, Mapping) and "aoa_statements" not in given:
        unknown = [name for name in given if name not in modules]
        if unknown:
            raise InvalidArgument(f"mapping= is for {unknown[0]!r}, and the modules are {', '.join(modules) or 'none'}")
        return {name: Program.parse(program, config_of(name)) for name, program in given.items()}
    if "model" in modules:
        module = "model"
    elif len(modules) == 1:
        module = modules[0]
    else:
        found = ", ".join(modules) or "none"
        raise InvalidArgument(f"mapping= is for one module, and there are {found}; give a dict of mappings by name")
    return {module: Program.parse(given, config_of(module))}
