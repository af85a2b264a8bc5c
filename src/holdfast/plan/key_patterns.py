"""Selection of keys by shell-style patterns, for loads and conversions."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeySelection:
    """The selected keys: all keys, or those that match patterns.

    A pattern matches a key, "group/key", or a whole group. `used` collects the patterns that matched
    anything: a pattern that never matches is a mistake.
    """

    only: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)

    def selects(self, group: str, key: str, *aliases: str) -> bool:
        keys = (key, *aliases)
        labels = (*keys, *(f"{group}/{label}" for label in keys), group)
        only, ignored = (self._matches(patterns, labels) for patterns in (self.only, self.ignore))
        return not ignored and (only or not self.only)

    def _matches(self, patterns: tuple[str, ...], labels: tuple[str, ...]) -> bool:
        matching = {pattern for pattern in patterns for label in labels if fnmatch.fnmatchcase(label, pattern)}
        self.used.update(matching)
        return bool(matching)

    def selects_entry(self, name: str) -> bool:
        """Return True if the non-tensor value `name` is selected; patterns match its name."""
        return self.selects(name, name)
