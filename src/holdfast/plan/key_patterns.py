"""A choice of keys by shell-like patterns, as loads and conversions offer it."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Choice:
    """Which keys are taken: all, or those that patterns name.

    A pattern fits a key, "group/key", or a group, which then stands for all of it. `used`
    collects the patterns that fitted anything: one that never does is a mistake.
    """

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)

    def takes(self, group: str, key: str, *aliases: str) -> bool:
        keys = (key, *aliases)
        labels = (*keys, *(f"{group}/{label}" for label in keys), group)
        fits = [self._fits(patterns, labels) for patterns in (self.only, self.ignore)]
        return not fits[1] and (fits[0] or not self.only)

    def _fits(self, patterns: tuple[str, ...], labels: tuple[str, ...]) -> bool:
        found = {pattern for pattern in patterns for label in labels if fnmatch.fnmatchcase(label, pattern)}
        self.used.update(found)
        return bool(found)

    def takes_entry(self, name: str) -> bool:
        """Whether a value that is not a tensor is taken; patterns fit its name."""
        return self.takes(name, name)
