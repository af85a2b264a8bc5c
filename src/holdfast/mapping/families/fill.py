"""Templates of programs filled in: prefixes, head counts, and the blocks of a model.

In a template
  {p}                       is the prefix of the base model's keys, {layers} that of its layers
  {layer}                   is a layer by its id: `model.layers.$LAYER_ID`
  {layer} with {block}      is every layer with the block it becomes, a statement for each if they differ
  {dense_layer} {moe_layer} are the layers of one kind, {predictor} those that predict further tokens
  {heads} {kv_heads}        are counts from config.json, which the program cannot do without
  {qkv_sizes}               is `, sizes=[...]` where config.json tells them: only the reverse needs them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument
from holdfast.mapping.families.numbers import Config, Missing, head_size, heads, key_value_heads

_FIELD = re.compile(r"\{(\w+)\}")
_KINDS = ("dense_layer", "moe_layer", "predictor", "layer")


@dataclass(frozen=True, slots=True)
class Block:
    """A layer of the hub's naming (its number or id) and what it is called elsewhere."""

    layer: str
    block: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of a model by kind; one with an id stands for all of its kind.

    Predictors are layers like others, and listed once more for what they alone have.
    """

    dense: tuple[Block, ...] = ()
    moe: tuple[Block, ...] = ()
    predictors: tuple[Block, ...] = ()

    def of_kind(self, kind: str) -> tuple[Block, ...]:
        if kind == "layer":
            return tuple(dict.fromkeys((*self.dense, *self.moe)))
        return {"dense_layer": self.dense, "moe_layer": self.moe, "predictor": self.predictors}[kind]


@dataclass(frozen=True, slots=True)
class Filling:
    """What the fields of a template stand for."""

    config: Config
    prefix: str
    layers: str
    blocks: Callable[[Config], Blocks]

    def program(self, template: str, name: str) -> str:
        """The program; raises InvalidArgument with what the config would have to say."""
        lines: list[str] = []
        missing: dict[str, None] = {}
        for statement in _statements(template):
            try:
                lines += self._expanded(statement)
            except Missing as error:
                missing[error.args[0]] = None
        if missing:
            where = "has not got" if self.config else "was not given"
            raise InvalidArgument(
                f"the mapping {name!r} needs {', '.join(missing)} of the model's config.json, which {where}: "
                "use a folder that has one, or give config={...}"
            )
        return "\n".join(lines) + "\n"

    def _expanded(self, statement: str) -> Iterator[str]:
        """A statement once, or once for each block that it is about."""
        fields = _FIELD.findall(statement)
        kind = next((kind for kind in _KINDS if kind in fields), None)
        blocks: tuple[Block, ...] = (Block("$LAYER_ID", ""),)
        if kind is not None and (kind != "layer" or "block" in fields):
            blocks = self.blocks(self.config).of_kind(kind)
        for block in blocks:
            line = statement
            for field in fields:
                line = line.replace(f"{{{field}}}", self._value(field, block))
            yield f"{line}, optional" if block.optional and not line.endswith(", optional") else line

    def _value(self, field: str, block: Block) -> str:
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
    """Statements, each on one line."""
    held = ""
    for line in template.splitlines():
        held = f"{held} {line.strip()}".strip()
        if held and not held.endswith((",", "->")):
            yield held
            held = ""


def _qkv_sizes(config: Config) -> str:
    try:
        queries, others = heads(config) * head_size(config), key_value_heads(config) * head_size(config)
    except Missing:
        return ""
    return f", sizes=[{queries}, {others}, {others}]"
