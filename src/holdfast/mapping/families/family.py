"""`ModelFamily`: models with the same Hugging Face keys, and the program of each variant, filled in for a config."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.families.fill import LayerBlocks, TemplateValues
from holdfast.mapping.families.numbers import Config, MissingNumber

STACKED_VARIANT = "megatron-dist"  # the variant that stacks all layers


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """Models with the same Hugging Face keys, and their programs by variant: templates filled in from a config.

    `prefix` starts the base model's keys inside a model with a head, and is followed by `layers`. `renames` map
    parts of target keys to their names in another library version.
    """

    name: str
    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    programs: Mapping[str, str]
    blocks: Callable[[Config], LayerBlocks]
    prefix: str = "model."
    layers: str = "layers"
    renames: Mapping[str, str] = field(default_factory=dict)

    def program(
        self, variant: str, config: Config | None = None, keys: Iterable[str] | None = None, name: str | None = None
    ) -> str:
        """Return the text of a program. Hugging Face `keys` show whether the keys have the prefix.

        `name` is the name in errors, as the user wrote it.
        """
        if variant not in self.programs:
            known = ", ".join(f"{self.name}-{word}" for word in self.programs)
            raise InvalidArgument(f"the family {self.name!r} has no mapping {variant!r}; its mappings are {known}")
        if variant == STACKED_VARIANT and config:
            self._check_layers_stack(config)
        names = tuple(keys or ())
        bare = bool(names) and not any(key.startswith(self.prefix) for key in names)
        values = TemplateValues(config or {}, "" if bare else self.prefix, self.layers, self.blocks)
        return values.program(self.programs[variant], name or f"{self.name}-{variant}")

    def _check_layers_stack(self, config: Config) -> None:
        """Raise InvalidArgument if layers differ, because only some of them would be stacked."""
        try:
            blocks = self.blocks(config)
        except MissingNumber:
            return  # TemplateValues.program reports what is missing
        if blocks.dense and blocks.moe:
            dense = ", ".join(block.layer for block in blocks.dense[:6])
            raise InvalidArgument(
                f"{self.name}-{STACKED_VARIANT} stores each weight of all layers in one tensor, but by config.json the "
                f"layers {dense} are dense and others have experts; use {self.name}-{STACKED_VARIANT}-layers"
            )
