"""Hooks into Trainer's callbacks: on_save waits for the commit; loaded values are set when training begins."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback

from holdfast.core.warnings import warn
from holdfast.integrations.transformers.data_position import StepCounter


class HookTarget(Protocol):
    """The part of the plug-in that the hooks call."""

    trainer: Any
    counter: StepCounter

    def begin_training(self) -> None: ...

    def require_loaded(self) -> None: ...

    def begin_epoch(self, loader: Any) -> None: ...

    def has_saved(self, step: int) -> bool: ...

    def remove_extras_folder(self, step: int) -> None: ...


class TrainerHooks(TrainerCallback):
    """The callback of the plug-in: the first event after Trainer zeroes its counters, its epochs and steps."""

    def __init__(self, plugin: HookTarget) -> None:
        self._plugin = plugin

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plugin.begin_training()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plugin.begin_epoch(kwargs["train_dataloader"])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plugin.require_loaded()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plugin.counter.end_step()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._plugin.counter.end_epoch()


class LateSaveEvents:
    """A part of CallbackHandler whose on_save only says that the save has begun; `CommittedSaves` calls the callbacks.

    If an override of `_save_checkpoint` did not reach Holdfast, the callbacks are called at once, as Trainer does.
    """

    holdfast_plugin: HookTarget

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_save = False
        self.holdfast_plugin.remove_extras_folder(state.global_step)
        if self.holdfast_plugin.has_saved(state.global_step):
            return control
        if state.is_world_process_zero:
            warn(
                f"step {state.global_step} was not saved by Holdfast: {type(self.holdfast_plugin.trainer).__name__} "
                "has a _save_checkpoint of its own that does not call Trainer's"
            )
        return self.call_event("on_save", args, state, control, **kwargs)  # type: ignore[attr-defined]


def defer_on_save(handler: Any, plugin: HookTarget) -> None:
    """Give a callback handler the late on_save."""
    kind = type(handler)
    handler.__class__ = type(kind.__name__, (LateSaveEvents, kind), {"__module__": kind.__module__})
    handler.holdfast_plugin = plugin
