"""The report of a load: which keys were loaded, missing, unexpected, cast or left unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load, the same on every rank except for bytes and seconds, which are this rank's.

    `non_persistent` names buffers that were registered with persistent=False: the load left them
    unchanged. After `to_empty` they hold no values: compute them again. `computed` names those on the meta device,
    which their modules computed anew, and `on_meta` the tensors of modules that stay on the meta device.

    `loaded`, `missing`, `unexpected`, `mismatched` and `cast` name tensors with the entry of the state that has
    them, as in "model: weight"; `values` is the number of other values. `needed_bytes` are those that the state asked
    for, `read_bytes` those that this rank read from storage, `phases` the seconds of plan, read and place.
    """

    step: int | None
    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    cast: tuple[str, ...]
    notes: tuple[str, ...]
    values: int
    verified: bool
    needed_bytes: int
    read_bytes: int
    seconds: float
    non_persistent: tuple[str, ...] = ()  # buffers of the live modules that no checkpoint holds
    computed: tuple[str, ...] = ()
    on_meta: tuple[str, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict)  # the seconds of plan, read and place
    names: Mapping[str, str] = field(default_factory=dict)  # by module: the mapping to the names in the files, or ""
    reading: str = ""  # with several hosts: whether one read for the others, and why

    @property
    def is_partial(self) -> bool:
        """True if keys were left out, or values of param groups were changed."""
        return bool(self.missing or self.unexpected or self.mismatched or self.notes)

    @property
    def difference(self) -> str:
        """How the restored state differs from what was saved, after the name of the step."""
        if self.missing or self.unexpected or self.mismatched:
            return f", not all of it as it was saved: {self}"
        return f"; {'; '.join(self.notes)}"

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors and {self.values} other values of {self.path}"]
        for name in ("missing", "unexpected", "mismatched", "cast", "notes"):
            found = getattr(self, name)
            if found:
                parts.append(f"{name}: " + "; ".join(found[:5]) + (" ..." if len(found) > 5 else ""))
        if self.non_persistent:
            more = " ..." if len(self.non_persistent) > 5 else ""
            parts.append(f"not stored, left as they are: {'; '.join(self.non_persistent[:5])}{more}")
        if self.on_meta:
            more = " ..." if len(self.on_meta) > 5 else ""
            parts.append(f"still on the meta device: {'; '.join(self.on_meta[:5])}{more}")
        if self.reading:
            parts.append(self.reading)
        return "\n".join(parts)
