"""Options of TrainingArguments and callbacks that change when a Trainer saves, evaluates and ends."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from transformers import TrainerCallback

from tests.integrations.trainer_cases import attached, error_of
from tests.integrations.trainer_runs import train


class Interrupt(TrainerCallback):
    """Ends train() as Ctrl-C in a notebook does, at a step that was not saved."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            raise KeyboardInterrupt


class Asks(TrainerCallback):
    """Asks for saves where TrainingArguments ask for none."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step in (3, 5)


class Terminates(TrainerCallback):
    """Sends SIGTERM to its own process, and gives Trainer's timer the time to see it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(4)  # Trainer waits for 3 s, in case SIGKILL follows


def interrupt(folder: str, changes: dict[str, Any]) -> Any:
    """Train up to an interrupt; return the trainer."""
    trainer = attached(folder, changes)
    trainer.add_callback(Interrupt)
    try:
        train(trainer, folder)
    except KeyboardInterrupt:
        trainer.remove_callback(Interrupt)
    assert trainer.state.global_step == 7
    return trainer


def interrupted_object(folder: str) -> dict[str, Any]:
    """Train, interrupt, and train the same object again, as in a notebook."""
    whole = train(attached(f"{folder}-whole"), f"{folder}-whole")
    return {"whole": whole, "again": train(interrupt(folder, {}), folder)}


def evaluate_at_start(folder: str) -> dict[str, Any]:
    changes = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 3}
    whole = train(attached(f"{folder}-whole", changes), f"{folder}-whole")
    interrupt(folder, changes)
    return {"whole": whole, "again": train(attached(folder, changes), folder)}


def saves_of_a_callback(folder: str) -> dict[str, Any]:
    """Save only when a callback asks, first in a new root, then in one with steps."""
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        trainer = attached(folder, {"save_strategy": "no", "max_steps": 6})
        trainer.add_callback(Asks)
        if name == "first":
            found[name] = train(trainer, folder, resume=None)["steps"]
        else:
            found[name] = error_of(trainer.train)
    return found


def terminated(folder: str) -> dict[str, Any]:
    """End by SIGTERM with Trainer's own enable_jit_checkpoint, and go on."""
    whole = train(attached(f"{folder}-whole", {"save_steps": 50}), f"{folder}-whole")
    trainer = attached(folder, {"save_steps": 50, "enable_jit_checkpoint": True})
    trainer.add_callback(Terminates)
    saved = train(trainer, folder)["steps"]
    return {"whole": whole, "saved": saved, "again": train(attached(folder, {"save_steps": 50}), folder)}
