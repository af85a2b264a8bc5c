"""The numbered layers of a model: which keys belong to which layer, found in the keys and checked with the config."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

COUNT_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_NUMBERED = re.compile(r"(?P<prefix>(?:[^.]+\.)*?)(?P<number>[0-9]+)(?P<rest>\..+)")


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The prefix of the keys of layers, such as "model.layers.", and the number of layers; ("", 0) without layers."""

    prefix: str
    count: int

    @staticmethod
    def of(keys: Iterable[str], config: Mapping[str, Any]) -> LayerNames:
        """Find the layers of a model: the prefix with as many numbers as the config says, else with the most keys."""
        numbers: dict[str, set[int]] = {}
        members: Counter[str] = Counter()
        for key in keys:
            match = _NUMBERED.fullmatch(key)
            if match is not None:
                numbers.setdefault(match["prefix"], set()).add(int(match["number"]))
                members[match["prefix"]] += 1
        counts = {prefix: len(found) for prefix, found in numbers.items() if found == set(range(len(found)))}
        stated = layer_count(config)
        fitting = [prefix for prefix in counts if counts[prefix] == stated] or list(counts)
        if not fitting:
            return LayerNames("", 0)
        prefix = max(fitting, key=lambda name: members[name])
        return LayerNames(prefix, counts[prefix])

    def number(self, key: str) -> int | None:
        """Return the number of the layer that a key belongs to, None for a key outside of the layers."""
        match = _NUMBERED.fullmatch(key) if self.count else None
        return int(match["number"]) if match is not None and match["prefix"] == self.prefix else None

    def depth(self, key: str) -> float:
        """Return the position of a key's layer from 0 (first) to 1 (last); 0 outside of the layers."""
        number = self.number(key)
        if number is None:
            return 0.0
        return number / (self.count - 1) if self.count > 1 else 1.0


def layer_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers that a config states, None if it states none."""
    nested = config.get("text_config")
    scopes = [config, nested] if isinstance(nested, dict) else [config]
    for scope in scopes:
        for field in COUNT_FIELDS:
            if isinstance(scope.get(field), int):
                return int(scope[field])
    return None
