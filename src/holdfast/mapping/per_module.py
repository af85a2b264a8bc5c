"""The user's `mapping=` argument: check it before use, and parse it to one program per module, also reversed."""

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
class ModelInfo:
    """Facts about a module that built-in mappings need.

    These are the model's config.json and the keys on both sides of the program, as far as they are known.
    """

    config: Mapping[str, Any] | None = None
    sources: Collection[str] | None = None
    targets: Collection[str] | None = None


def programs(
    mapping: Any, modules: Sequence[str], model_info: Callable[[str], ModelInfo], *, reverse: bool = False
) -> dict[str, Program]:
    """Return the programs by module. `mapping` is one program, for "model" or the only module, or a dict by module.

    With `reverse` each program is reversed: a state saved through a mapping is loaded through its reverse.
    """
    found = _by_module(mapping, modules, model_info)
    return {name: program.reverse() for name, program in found.items()} if reverse else found


def _by_module(mapping: Any, modules: Sequence[str], model_info: Callable[[str], ModelInfo]) -> dict[str, Program]:
    if isinstance(mapping, Mapping) and "aoa_statements" not in mapping:
        unknown = [name for name in mapping if name not in modules]
        if unknown:
            raise InvalidArgument(f"mapping= names {unknown[0]!r}, but the modules are {', '.join(modules) or 'none'}")
        return {name: parse_for_module(program, model_info(name)) for name, program in mapping.items()}
    if "model" in modules:
        module = "model"
    elif len(modules) == 1:
        module = modules[0]
    else:
        available = ", ".join(modules) or "none"
        raise InvalidArgument(
            f"mapping= is for one module, but there are: {available}; pass a dict of mappings by module"
        )
    return {module: parse_for_module(mapping, model_info(module))}


def check_mapping(mapping: Any, *, reversible: bool = False) -> None:
    """Check a mapping before any state is read. Raises InvalidArgument if invalid, NotFound for a missing file.

    A built-in mapping is only looked up by name, because it may need a config.json. With `reversible` the
    mapping must also have a reverse.
    """
    by_module = isinstance(mapping, Mapping) and "aoa_statements" not in mapping
    for program in mapping.values() if by_module else [mapping]:
        if isinstance(program, str) and families.is_name(program):
            continue
        found = Program.parse(program)
        if reversible:
            found.reverse()


def parse_for_module(mapping: Any, model_info: ModelInfo) -> Program:
    """Parse a program; a built-in mapping is filled in for this model."""
    is_reverse = isinstance(mapping, str) and families.is_reverse(mapping)
    return Program.parse(mapping, model_info.config, model_info.targets if is_reverse else model_info.sources)
