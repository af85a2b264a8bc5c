"""`Peek`, the checkpoint that a restore would take: its step, metrics and values, before any model exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format import statejson
from holdfast.layout.coordinates import own_value
from holdfast.plan.subclass_keys import SUBCLASSES


@dataclass(frozen=True, slots=True)
class Peek:
    """A checkpoint at a glance.

    `values` are the entries of the state but models, optimizers and averages, as this rank would load them; classes
    of the program are plain data, and tensors inside are references. An entry that was saved for other coordinates
    than this rank's is left out: on a mesh of several axes, give the Checkpointer its `mesh`.
    """

    step: int
    path: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


def peek_at(ranks: Ranks, opener: Callable[[], Checkpoint], explicit_mesh: Any, *, verify: bool) -> Peek:
    """Read the values of a checkpoint on every rank; raises Damaged alike on all. Collective."""
    from holdfast.adapters.live_state import LiveState, live_mesh

    found: list[Peek] = []

    def look() -> None:
        checkpoint = opener()
        mesh = live_mesh(LiveState(), ranks.world, explicit_mesh)
        with checkpoint.held():
            values = {}
            for name, entry in checkpoint.state.items():
                if entry["kind"] in ("optimizer", "module", "averages", SUBCLASSES):
                    continue
                own = own_value(mesh, entry, ranks.rank, ranks.world)
                if own is not None:
                    values[name] = statejson.decode(own[0], checkpoint.path, lambda tag, content: {tag: content})
            if verify and ranks.rank == 0:
                files = checkpoint.manifest.files  # a restore reads none of a user's own
                damage = [
                    found
                    for found in checkpoint.verify().damage
                    if found.file not in files or not files[found.file].kind
                ]
                if damage:
                    raise Damaged(f"{checkpoint.path}: {damage[0].file}: {damage[0].problem}")
        assert checkpoint.step is not None
        found.append(Peek(checkpoint.step, checkpoint.path, dict(checkpoint.manifest.metrics), values))

    run_on_all_ranks(ranks, look)
    return found[0]
