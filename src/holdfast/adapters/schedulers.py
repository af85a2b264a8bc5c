"""Learning-rate schedulers: lists with a value for each param group, put in the live groups' order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.adapters.entries import LiveState


def regroup(scheduler: Any, state: Any, live: LiveState, entries: Mapping[str, Any]) -> Any:
    """A scheduler's saved state for an optimizer whose groups may have another order now.

    The optimizer's options follow parameter keys; base rates that stayed in the saved order
    would silently be another group's.
    """
    optimizer = getattr(scheduler, "optimizer", None)
    owner = next((own for own, value in live.optimizers.items() if value is optimizer), None)
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler) or owner is None or not isinstance(state, dict):
        return state
    saved = entries.get(owner, {}).get("groups", [])
    order = _saved_positions(optimizer, live.parameter_keys(optimizer)[1], saved)
    if order is None or order == list(range(len(saved))):
        return state
    return {
        key: [value[position] for position in order] if isinstance(value, list) and len(value) == len(saved) else value
        for key, value in state.items()
    }


def _saved_positions(optimizer: Any, key_of: Mapping[int, str], saved: Sequence[Mapping[str, Any]]) -> list[int] | None:
    """For each live group, which saved group its parameters were in; None if that cannot be said."""
    position_of = {key: position for position, group in enumerate(saved) for key in group["params"]}
    order = []
    for group in optimizer.param_groups:
        found = {position_of.get(key_of.get(id(param), "")) for param in group["params"]}
        if len(found) != 1 or None in found:
            return None
        order.append(found.pop())
    return [position for position in order if position is not None]
