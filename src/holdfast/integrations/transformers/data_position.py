"""The position in the data: the epoch and its steps, each of as many samples as before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.trainer_utils import has_length

from holdfast.core.errors import Mismatch


class StepCounter:
    """Counts the epochs of a run and the steps of each.

    Trainer divides the steps of the run by those of an epoch. That is another place where a callback stopped an epoch
    early, or where the data has no length and was read several times.
    """

    def __init__(self) -> None:
        self.epoch = self.steps = 0
        self._next = (0, 0)
        self.has_ended = True  # the epoch, or its data within a gradient accumulation

    def start(self, epoch: int, steps: int) -> None:
        """Begin with an epoch of which some steps were done."""
        self._next = (epoch, steps)
        self.epoch, self.steps = self._next

    def begin_epoch(self) -> bool:
        """Count an epoch; return True if some of its steps were done by an earlier start."""
        self.epoch, self.steps = self._next
        self._next = (self.epoch + 1, 0)
        self.has_ended = False
        return self.steps > 0

    def end_step(self) -> None:
        """Count a step."""
        self.steps += 1

    def end_epoch(self) -> None:
        """Note that the epoch is over, or the training amid it."""
        self.has_ended = True

    def position(self, control: Any, steps_per_epoch: int | None) -> dict[str, int]:
        """Return where a run goes on after this step."""
        stops = control.should_epoch_stop or (self.has_ended and not control.should_training_stop)
        if stops or (steps_per_epoch is not None and self.steps >= steps_per_epoch):
            return {"epoch": self.epoch + 1, "steps": 0}
        return {"epoch": self.epoch, "steps": self.steps}


def data_layout(trainer: Any, steps_per_epoch: int | None) -> dict[str, Any]:
    """Return what a step of this trainer consumes, to compare after a restart."""
    batch, accumulation = trainer._train_batch_size, trainer.args.gradient_accumulation_steps
    samples = trainer.get_total_train_batch_size(trainer.args)
    sized = trainer.train_dataset is not None and has_length(trainer.train_dataset)
    return {
        "samples_per_step": samples,
        "batch": batch,
        "accumulation": accumulation,
        "replicas": samples // max(1, batch * accumulation),
        "steps_per_epoch": steps_per_epoch if sized else None,
    }


def require_same_data(saved: Mapping[str, Any], live: Mapping[str, Any], *, ignore_data_skip: bool) -> None:
    """Raise Mismatch if the steps of the saved run and of this one do not name the same samples."""
    if ignore_data_skip:
        return
    way_out = "or set ignore_data_skip=True to begin the epoch anew"
    if saved["samples_per_step"] != live["samples_per_step"]:
        raise Mismatch(
            f"{_text(saved)} a step were trained, now it would be {_text(live)}: the position in the data is counted "
            "in steps. Set per_device_train_batch_size and gradient_accumulation_steps so that their product with "
            f"the number of replicas stays {saved['samples_per_step']}, {way_out}"
        )
    before, now = saved["steps_per_epoch"], live["steps_per_epoch"]
    if before is not None and now is not None and before != now:
        raise Mismatch(
            f"an epoch had {before} steps, now it has {now}: the dataset has another length, and its order would be "
            f"another. Train on the same dataset, {way_out}"
        )


def _text(layout: Mapping[str, Any]) -> str:
    parts = f"{layout['replicas']} replicas x {layout['batch']} x {layout['accumulation']} accumulated"
    return f"{layout['samples_per_step']} samples ({parts})"
