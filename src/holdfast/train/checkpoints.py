"""The [checkpoint] settings, when to save and what to keep, and the run's Checkpointer opened with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import keep, when
from holdfast.core.errors import InvalidArgument
from holdfast.core.events import Listener
from holdfast.mapping.per_module import MappingLike

if TYPE_CHECKING:
    from holdfast.checkpointer import Checkpointer

FOLDER = "checkpoints"


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Save every `every_steps` steps or `every_seconds` seconds (0 disables either), at the end, and on SIGTERM.

    The last `keep_last` steps and every multiple of `keep_every` are kept; all steps if both are 0.
    `model_dtype` rounds the weights stored for inference; fp32 master weights are stored as well.
    """

    every_steps: int = 100
    every_seconds: float = 0.0
    at_end: bool = True
    keep_last: int = 3
    keep_every: int = 0
    model_dtype: str | None = None
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        if min(self.every_steps, self.every_seconds, self.keep_last, self.keep_every) < 0:
            raise InvalidArgument("checkpoint.every_steps, every_seconds, keep_last and keep_every must be 0 or more")
        if self.model_dtype not in (None, "bfloat16", "float16"):
            raise InvalidArgument(f"checkpoint.model_dtype={self.model_dtype!r}: choose bfloat16 or float16")

    def occasion(self) -> when.Occasion:
        occasion = when.preempted()
        if self.every_steps:
            occasion |= when.steps(self.every_steps)
        return occasion | when.seconds(self.every_seconds) if self.every_seconds else occasion

    def policy(self) -> keep.Policy | None:
        policies = [keep.last(self.keep_last)] if self.keep_last else []
        policies += [keep.every(self.keep_every)] if self.keep_every else []
        return None if not policies else policies[0] if len(policies) == 1 else policies[0] | policies[1]


def open_checkpointer(
    config: CheckpointConfig,
    folder: Path,
    *,
    mapping: MappingLike | None,
    ties: Mapping[str, str],
    mesh: Any,
    listener: Listener,
) -> Checkpointer:
    """Open the Checkpointer of a run, under its folder."""
    from holdfast.checkpointer import Checkpointer

    return Checkpointer(
        folder / FOLDER,
        mapping=mapping,
        ties=ties,
        mesh=mesh,
        max_shard_size=config.max_shard_size,
        model_dtype=config.model_dtype,
        keep=config.policy(),
        when=config.occasion(),
        on_event=listener,
    )
