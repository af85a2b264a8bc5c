"""Learning-rate schedulers: reorder the lists with one value per param group to match the live groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.adapters.live_state import LiveState

_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "min_lrs", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums", "swa_lrs"}
)


def regroup(scheduler: Any, state: Any, live: LiveState, entries: Mapping[str, Any]) -> Any:
    """Return a scheduler's saved state for an optimizer whose groups may be in a different order now.

    The optimizer's options follow parameter keys. Base learning rates left in the saved order would
    silently apply to the wrong group.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    owner = next((own for own, value in live.optimizers.items() if value is optimizer), None)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or owner is None or not isinstance(state, dict):
        return state
    saved = entries.get(owner, {}).get("groups", [])
    order = _saved_positions(optimizer, live.parameter_keys(optimizer)[1], saved)
    if order is None or order == list(range(len(saved))):
        return state
    return _reordered(state, order, len(saved))


def _reordered(state: Mapping[str, Any], order: Sequence[int], count: int) -> dict[str, Any]:
    out = dict(state)
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, list) and len(value) == count:
            out[key] = [value[position] for position in order]
        elif key == "_schedulers":
            out[key] = [_reordered(inner, order, count) for inner in value]
    return out


def _saved_positions(optimizer: Any, key_of: Mapping[int, str], saved: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """Return the index of the saved group for each live group; None if a live group has no single saved group."""
    position_of = {key: position for position, group in enumerate(saved) for key in group["params"]}
    order = []
    for group in optimizer.param_groups:
        positions = {position_of.get(key_of.get(id(param), "")) for param in group["params"]}
        if len(positions) != 1 or None in positions:
            return None
        order.append(positions.pop())
    return [position for position in order if position is not None]
