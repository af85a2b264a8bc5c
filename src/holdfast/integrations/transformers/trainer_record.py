"""TrainerState as entries of the state: fields that are equal on all ranks, and the log history of rank 0.

The fields are read before any model exists. The history differs between ranks (evaluation times), grows with the
run, and would be encoded anew at every save: its text is kept, and new entries are appended.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState

_LOG = "log_history"
# Differ between the ranks, or are derived again after a restore.
_LEFT_OUT = (_LOG, "is_local_process_zero", "is_world_process_zero", "best_model_checkpoint", "stateful_callbacks")


def state_fields(trainer: Any) -> dict[str, Any]:
    """Return the fields of TrainerState to save, with the states of the callbacks as they are now."""
    fields = {field.name: getattr(trainer.state, field.name) for field in dataclasses.fields(trainer.state)}
    for name in _LEFT_OUT:
        fields.pop(name, None)
    exportable: Any = exportable_states([*trainer.callback_handler.callbacks, trainer.control])
    fields["stateful_callbacks"] = TrainerState(stateful_callbacks=exportable).stateful_callbacks
    return copy.deepcopy(fields)


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def exportable_states(callbacks: list[Any]) -> list[Any]:
    """Return the callbacks that can say their state."""
    return [callback for callback in callbacks if isinstance(callback, ExportableState)]


def state_json(fields: Mapping[str, Any], log_text: str = "[]") -> str:
    """Return the text of a trainer_state.json; unknown fields, of another version of transformers, are left out."""
    known = {field.name for field in dataclasses.fields(TrainerState)}
    plain = {name: value for name, value in fields.items() if name in known}
    return f'{_encode(plain)[:-1]}, "{_LOG}": {log_text}}}\n'


class LogHistory:
    """The log history as an entry of the state: the text of rank 0, nothing on the others."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._encoded: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self.loaded: str | None = None

    def text(self) -> str:
        """Return the history of this rank as a JSON array."""
        history = self._trainer.state.log_history
        if history[: len(self._encoded)] != self._encoded:  # changed by a callback, or another run
            self._encoded, self._texts = [], []
        for entry in history[len(self._encoded) :]:
            self._encoded.append(dict(entry))
            self._texts.append(_encode(entry))
        return f"[{', '.join(self._texts)}]"

    def state_dict(self) -> dict[str, Any]:
        return {_LOG: self.text() if self._trainer.is_world_process_zero() else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state[_LOG]

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Return the history of the rank that had it."""
        return next((state for state in states.values() if state[_LOG] is not None), {_LOG: "[]"})


def _encode(value: Any) -> str:
    return json.dumps(value, default=_plain_number)


def _plain_number(value: Any) -> Any:
    """Return a numpy or torch scalar as a number."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be stored in trainer_state.json")
