"""Families: models that share their keys, and the programs that take those keys elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.families.fill import Blocks, Filling
from holdfast.mapping.families.numbers import Config, Missing

ALL_ALIKE = "megatron-dist"  # the variant that stacks all layers


@dataclass(frozen=True, slots=True)
class Family:
    """Models with one naming on the hub, and their programs by variant: templates, filled in from a config.

    `prefix` is what keys of the base model begin with inside a model with a head; `layers` comes next. `renames` are
    pieces of other programs' keys under the names that another version has for them.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    programs: Mapping[str, str]
    blocks: Callable[[Config], Blocks]
    prefix: str = "model."
    layers: str = "layers"
    renames: Mapping[str, str] = field(default_factory=dict)

    def program(self, variant: str, config: Config | None = None, keys: Iterable[str] | None = None) -> str:
        """The text of a program; `keys` of the hub's naming tell whether they have the prefix."""
        if variant not in self.programs:
            known = ", ".join(f"{self.name}-{word}" for word in self.programs)
            raise InvalidArgument(f"the family {self.name!r} has no mapping {variant!r}; it has {known}")
        if variant == ALL_ALIKE and config:
            self._check_alike(config)
        names = tuple(keys or ())
        bare = bool(names) and not any(key.startswith(self.prefix) for key in names)
        filling = Filling(config or {}, "" if bare else self.prefix, self.layers, self.blocks)
        return filling.program(self.programs[variant], f"{self.name}-{variant}")

    def _check_alike(self, config: Config) -> None:
        """Raise InvalidArgument if layers differ: of unequal ones, only some would be stacked."""
        try:
            blocks = self.blocks(config)
        except Missing:
            return  # the program says what it misses
        if blocks.dense and blocks.moe:
            dense = ", ".join(block.layer for block in blocks.dense[:6])
            raise InvalidArgument(
                f"{self.name}-{ALL_ALIKE} holds every weight of all layers in one tensor, and by config.json the "
                f"layers {dense} are dense and others have experts; use {self.name}-{ALL_ALIKE}-layers"
            )
