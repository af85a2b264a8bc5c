"""Findings of a load on one rank: requested keys and mismatches, as texts that ranks can gather."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Findings:
    """Keys this rank requested, and the mismatches; strings, so that ranks can gather them."""

    wanted: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)  # buffers that no checkpoint holds, computed anew
    on_meta: list[str] = field(default_factory=list)  # tensors of modules that stay on the meta device
