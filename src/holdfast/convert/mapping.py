"""Mappings on their way through a conversion: which one, for which module, and what must be equal for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.convert.select import is_model
from holdfast.core.errors import Damaged, Unsupported
from holdfast.format import strictjson
from holdfast.mapping.choose import Around, programs
from holdfast.mapping.contents import Same, map_contents
from holdfast.plan.contents import Contents

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class MappingOptions:
    """A mapping as users give it, the way it is used, and the TP degree of fused weights."""

    written: Any = None
    reverse: bool = False
    tp_degree: int | None = None


def mapped(
    contents: Contents, options: MappingOptions, side_files: Mapping[str, bytes]
) -> tuple[Contents, tuple[Same, ...]]:
    """The contents under the keys of the target, and the scalars that must be equal for it to be right."""
    if options.tp_degree is not None:
        contents = replace(contents, tp_degree=options.tp_degree)
    if options.written is None:
        return contents, ()
    modules = [name for name, group in contents.groups.items() if is_model(name, group) and "/" not in name]

    def around(module: str) -> Around:
        stored = contents.groups[module].tensors
        config = _config(side_files) if module == "model" else None
        return Around(config, targets=stored) if options.reverse else Around(config, stored)

    same: list[Same] = []
    for module, program in programs(options.written, modules, around, reverse=options.reverse).items():
        found = map_contents(contents, module, program, target_tp=contents.tp_degree)
        if found.kept:
            kept = ", ".join(sorted(found.kept)[:5])
            raise Unsupported(f"{kept}: the mapping keeps the initial value, and a conversion has none; remove `_ ->`")
        contents = found.contents
        same += found.same
    return contents, tuple(same)


def _config(side_files: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    if _CONFIG not in side_files:
        return None
    config = strictjson.loads(side_files[_CONFIG], _CONFIG)
    if not isinstance(config, dict):
        raise Damaged(f"{_CONFIG}: not an object")
    return config
