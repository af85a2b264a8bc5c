"""Fill in the fields of program templates: key prefixes, head counts, layers of each kind, sizes of q, k and v.

In a template
  {p}                       is the prefix of the base model's keys, {layers} that of its layers
  {layer}                   is a layer by its id: `model.layers.$LAYER_ID`
  {layer} with {block}      is every layer with its block, one statement each if they differ
  {dense_layer} {moe_layer} are the layers of one kind, {predictor} the multi-token prediction layers
  {heads} {kv_heads}        are required counts from config.json
  {qkv_sizes}               is `, sizes=[...]` if config.json has them: only the reverse needs them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.families.numbers import Config, MissingNumber, head_size, heads, key_value_heads

_FIELD = re.compile(r"\{(\w+)\}")
_KINDS = ("dense_layer", "moe_layer", "predictor", "layer")


@dataclass(frozen=True, slots=True)
class LayerBlock:
    """A layer's Hugging Face number or id, and its name elsewhere."""

    layer: str
    block: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """The blocks of a model by kind. A block with an id stands for all of its kind.

    Predictors are also listed as layers; `predictors` is for the weights that only they have.
    """

    dense: tuple[LayerBlock, ...] = ()
    moe: tuple[LayerBlock, ...] = ()
    predictors: tuple[LayerBlock, ...] = ()

    def of_kind(self, kind: str) -> tuple[LayerBlock, ...]:
        if kind == "layer":
            return tuple(dict.fromkeys((*self.dense, *self.moe)))
        return {"dense_layer": self.dense, "moe_layer": self.moe, "predictor": self.predictors}[kind]


@dataclass(frozen=True, slots=True)
class TemplateValues:
    """The values of the fields of a template."""

    config: Config
    prefix: str
    layers: str
    blocks: Callable[[Config], LayerBlocks]

    def program(self, template: str, name: str) -> str:
        """Fill in the program. Raises InvalidArgument with the config entries that are missing."""
        lines: list[str] = []
        missing: dict[str, None] = {}
        for statement in _statements(template):
            try:
                lines += self._expanded(statement)
            except MissingNumber as error:
                missing[error.args[0]] = None
        if missing:
            where = "lacks them" if self.config else "was not given"
            raise InvalidArgument(
                f"the mapping {name!r} needs {', '.join(missing)} from the model's config.json, which {where}; "
                "use a folder that has one, or pass config={...} (on the command line, --config PATH)"
            )
        return "\n".join(lines) + "\n"

    def _expanded(self, statement: str) -> Iterator[str]:
        """Yield a statement once, or once for each of its blocks."""
        fields = _FIELD.findall(statement)
        kind = next((kind for kind in _KINDS if kind in fields), None)
        blocks: tuple[LayerBlock, ...] = (LayerBlock("$LAYER_ID", ""),)
        if kind is not None and (kind != "layer" or "block" in fields):
            blocks = self.blocks(self.config).of_kind(kind)
        for block in blocks:
            line = statement
            for field in fields:
                line = line.replace(f"{{{field}}}", self._value(field, block))
            yield f"{line}, optional" if block.optional and not line.endswith(", optional") else line

    def _value(self, field: str, block: LayerBlock) -> str:
        if field in _KINDS:
            return f"{self.prefix}{self.layers}.{block.layer}"
        values: dict[str, Callable[[], str]] = {
            "block": lambda: block.block,
            "p": lambda: self.prefix,
            "layers": lambda: f"{self.prefix}{self.layers}",
            "heads": lambda: str(heads(self.config)),
            "kv_heads": lambda: str(key_value_heads(self.config)),
            "qkv_sizes": lambda: _qkv_sizes(self.config),
        }
        return values[field]()


def _statements(template: str) -> Iterator[str]:
    """Yield the statements, each on one line."""
    held = ""
    for line in template.splitlines():
        held = f"{held} {line.strip()}".strip()
        if held and not held.endswith((",", "->")):
            yield held
            held = ""


def _qkv_sizes(config: Config) -> str:
    try:
        queries, others = heads(config) * head_size(config), key_value_heads(config) * head_size(config)
    except MissingNumber:
        return ""
    return f", sizes=[{queries}, {others}, {others}]"
