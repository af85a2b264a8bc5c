"""Values of a method's parameters by key: one value, a value for each key pattern, or a gradient over the layers."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.core.names import natural_key

Scalar = bool | int | float


@dataclass(frozen=True, slots=True)
class SettingRule:
    """The values for keys that match a pattern: one value, or several as a gradient from first to last layer."""

    pattern: str
    values: tuple[Scalar, ...]
    may_match_nothing: bool = False  # as mergekit's filters

    def at(self, depth: float) -> Scalar:
        """Return the value at a depth between 0 (first layer) and 1 (last layer)."""
        if len(self.values) == 1:
            return self.values[0]
        if any(isinstance(value, bool) for value in self.values):
            return self.values[int(depth * (len(self.values) - 1))]
        position = depth * (len(self.values) - 1)
        below = int(position)
        above = min(len(self.values) - 1, below + 1)
        fraction = position - below
        return (1 - fraction) * self.values[below] + fraction * self.values[above]


@dataclass(frozen=True, slots=True)
class Setting:
    """The rules of one parameter. The first rule whose pattern matches a key decides."""

    rules: tuple[SettingRule, ...]

    @staticmethod
    def of(written: Any, name: str) -> Setting:
        """Parse a value, a list of values (a gradient), or a mapping from key patterns to either."""
        if isinstance(written, Setting):
            return written
        if isinstance(written, Mapping):
            return Setting(tuple(SettingRule(str(key), _values(value, name)) for key, value in written.items()))
        return Setting((SettingRule("*", _values(written, name)),))

    def at(self, key: str, depth: float) -> Scalar | None:
        """Return the value for a key, or None if no pattern matches it."""
        for rule in self.rules:
            if fnmatch.fnmatchcase(key, rule.pattern):
                return rule.at(depth)
        return None

    def check(self, keys: Collection[str], name: str) -> None:
        """Raise InvalidArgument if a pattern matches none of the keys: then it is misspelled."""
        for rule in self.rules:
            if rule.pattern != "*" and not rule.may_match_nothing and not fnmatch.filter(keys, rule.pattern):
                near = ", ".join(sorted(keys, key=natural_key)[:3])
                raise InvalidArgument(f"{name}: no key matches {rule.pattern!r}; keys are, for example, {near}")

    def written(self) -> Any:
        """Return the setting as it is written in a file."""
        values = {rule.pattern: rule.values[0] if len(rule.values) == 1 else list(rule.values) for rule in self.rules}
        return values["*"] if list(values) == ["*"] else values


Settings = Mapping[str, Setting]


def _values(written: Any, name: str) -> tuple[Scalar, ...]:
    values = written if isinstance(written, Sequence) and not isinstance(written, str) else [written]
    if not values:
        raise InvalidArgument(f"{name}: expected a number, a list of numbers, or a table of key patterns; got []")
    return tuple(number(value, name) for value in values)


def number(value: Any, name: str) -> Scalar:
    """Return a number or a truth value, also one that is written as text; raises InvalidArgument for others."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("true", "false"):
            return text == "true"
        try:
            value = float(text)
        except ValueError:
            raise InvalidArgument(f"{name}: expected a number, got {value!r}") from None
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise InvalidArgument(f"{name}: expected a finite number, got {value!r}")
    return value
