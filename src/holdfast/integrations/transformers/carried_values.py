"""State of a trainer outside of TrainerState: running loss, buffered completions, metrics since the last log.

No native checkpoint has it. Trainer zeroes the counters right before on_train_begin, so that loaded values are
kept until `apply()`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.core.warnings import warn
from holdfast.layout.coordinates import CoordinateChange

_TRAINER = ("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
_TRL = (
    *("_step", "_buffered_inputs", "_metrics", "_total_train_tokens", "_current_train_step_time"),
    *("_last_world_entropy", "_entropy_window_stats", "_pending_metrics", "_pending_extra_logs"),
)
_MEAN = "_tr_loss"  # a sum of this rank, averaged over the ranks when it is logged
_ELAPSED = "elapsed_s"


class CarriedValues:
    """Attributes of a trainer by name, as an entry of the state; each rank has its own."""

    def __init__(self, trainer: Any, extra: Sequence[str] = ()) -> None:
        self._trainer = trainer
        self._extra = tuple(extra)
        self._loaded: Mapping[str, Any] | None = None
        self.reshard_note = ""
        self.started_at: float | None = None  # when this call of train() began
        self.earlier_s = 0.0  # time of earlier starts of the run

    def names(self) -> tuple[str, ...]:
        """Return the names of the attributes to carry that the trainer has."""
        names = [*_TRAINER, *self._extra]
        if any(kind.__module__.partition(".")[0] == "trl" for kind in type(self._trainer).__mro__):
            names += _TRL
            if getattr(self._trainer, "use_adaptive_entropy", False):
                names.append("entropy_coef")
        return tuple(name for name in dict.fromkeys(names) if hasattr(self._trainer, name))

    def state_dict(self) -> dict[str, Any]:
        """Return the values as they are now, or those that were loaded and wait for `apply()`."""
        if self._loaded is not None:
            return dict(self._loaded)
        values = {name: _stored(getattr(self._trainer, name)) for name in self.names()}
        now = 0.0 if self.started_at is None else time.time() - self.started_at
        return {**values, _ELAPSED: self.earlier_s + now}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the values until `apply()`."""
        self._loaded = dict(state)

    def apply(self) -> None:
        """Set the attributes that were loaded; does nothing without a load."""
        if self._loaded is None:
            return
        loaded, self._loaded = dict(self._loaded), None
        self.earlier_s = loaded.pop(_ELAPSED, 0.0)
        lost = sorted(set(self._extra) - set(loaded))
        if lost and self._trainer.is_world_process_zero():
            warn(f"carry: the restored step has no {', '.join(lost)}; the trainer keeps its own")
        device = self._trainer.args.device
        for name, value in loaded.items():
            live: Any = getattr(self._trainer, name, None)
            if hasattr(live, "load_state_dict"):
                live.load_state_dict(value)
            else:
                setattr(self._trainer, name, _on_device(value, device))

    def forget(self) -> None:
        """Forget what an earlier call of train() left."""
        self._loaded, self.started_at, self.earlier_s = None, None, 0.0

    def holdfast_reshard_at(
        self, states: Mapping[tuple[int, ...], Any], coordinate: tuple[int, ...], change: CoordinateChange
    ) -> Any:
        """Return the values for another mesh: those that are equal on all ranks, and the mean of the running loss."""
        first, *others = (states[key] for key in sorted(states))
        kept = {name: value for name, value in first.items() if all(_equal(value, other[name]) for other in others)}
        kept[_ELAPSED] = first.get(_ELAPSED, 0.0)
        if _MEAN in first:
            kept[_MEAN] = torch.stack([state[_MEAN].double() for state in states.values()]).mean().to(first[_MEAN])
        lost = sorted(set(first) - set(kept))
        if lost:
            self.reshard_note = f"trainer: {', '.join(lost)} differed between the ranks and begin anew on another mesh"
        return kept


def _stored(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _on_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in plain lists, tuples and dicts to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (list, tuple):
        return type(value)(_on_device(item, device) for item in value)
    if type(value) is dict:
        return {key: _on_device(item, device) for key, item in value.items()}
    return value


def _equal(one: Any, other: Any) -> bool:
    """Compare two values; those with tensors inside count as different."""
    try:
        return bool(one == other)
    except (RuntimeError, ValueError, TypeError):
        return False
