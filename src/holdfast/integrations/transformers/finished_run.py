"""Runs that are started again after their end: why nothing is left to train, and the log line that says so."""

from __future__ import annotations

import logging
from typing import Any

from transformers import EarlyStoppingCallback
from transformers.utils.logging import get_logger

_LOG = logging.getLogger("holdfast")
_SHOWN = get_logger("transformers.trainer")  # a script without logging shows its warnings


def why_finished(trainer: Any) -> str:
    """Return why a trainer that was restored has nothing to train, "" if it has.

    A run that EarlyStoppingCallback stopped is finished. Trainer forgets the count, and trains until it is reached
    again, at every start. Stops by other callbacks, such as at a time limit, are interruptions.
    """
    state = trainer.state
    if state.global_step >= state.max_steps:
        return f"the run has {state.max_steps} steps; raise max_steps or num_train_epochs to go on"
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, EarlyStoppingCallback):
            count, patience = callback.early_stopping_patience_counter, callback.early_stopping_patience
            if count >= patience:
                return (
                    f"{type(callback).__name__} stopped the run (evaluations without improvement: {count}); raise "
                    f"early_stopping_patience above {count} to go on"
                )
    return ""


def log_finished(trainer: Any) -> None:
    """Log, on rank 0, why nothing will be trained; log nothing if something will."""
    why = why_finished(trainer)
    if why and trainer.is_world_process_zero():
        show(f"step {trainer.state.global_step}: nothing is left to train: {why}")


def log_resumed(trainer: Any, step: int, path: str) -> None:
    """Show, on rank 0, the step that a run goes on from. The logger `holdfast` has shown it already if it is on."""
    if trainer.is_world_process_zero() and not _LOG.isEnabledFor(logging.INFO):
        show(f"step {step}: restored from {path}")


def show(text: str) -> None:
    """Log a line with the logger `holdfast`, or, where that shows nothing, as a warning of Trainer's logger."""
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info(text)
    else:
        _SHOWN.warning("holdfast: %s", text)
