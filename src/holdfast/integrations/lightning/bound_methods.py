"""Where Holdfast stands in a Trainer: the methods that it binds on the Trainer's own objects, and what they do."""

from __future__ import annotations

from typing import Any, Protocol


class TrainerListener(Protocol):
    """The object that the bound methods call."""

    def takes(self, checkpoint_path: Any) -> bool:
        """Return True for a path that Holdfast restores from."""

    def restore(self, trainer: Any, checkpoint_path: Any) -> bool:
        """Load everything; return False if there is nothing to load."""

    def loaders_ready(self) -> bool:
        """Called before training loaders iterate; return True if Lightning is to load states into them."""

    def val_loaders_ready(self) -> None:
        """Called before validation loaders iterate."""

    def begin_epoch(self, trainer: Any) -> None:
        """Called before the hooks that begin an epoch."""

    def end_batch(self, trainer: Any) -> None:
        """Called once nothing of a batch is left to do, nor of a validation after it."""

    def end_epoch(self, trainer: Any) -> None:
        """Called once nothing of an epoch is left to do."""


def bind(trainer: Any, listener: TrainerListener) -> None:
    """Bind the methods; again for each call of fit, validate, test and predict."""
    _bind_restore(trainer, trainer._checkpoint_connector, listener)
    fit_loop = trainer.fit_loop
    _bind_loaders(fit_loop, listener)
    _bind_epochs(trainer, fit_loop, listener)
    _bind_batches(trainer, fit_loop.epoch_loop, listener)


def _bind_restore(trainer: Any, connector: Any, listener: TrainerListener) -> None:
    """One load, once everything is live, in place of Lightning's several."""
    kind = type(connector)

    def resume_start(checkpoint_path: Any = None, weights_only: Any = None) -> None:
        if checkpoint_path and listener.takes(checkpoint_path):
            connector._ckpt_path, connector._loaded_checkpoint = checkpoint_path, {}
        else:
            kind.resume_start(connector, checkpoint_path, weights_only)

    def restore_training_state() -> None:
        path = connector._ckpt_path
        if not path or not listener.takes(path):
            kind.restore_training_state(connector)
        elif not listener.restore(trainer, path):
            connector._ckpt_path = None

    vars(connector).update(resume_start=resume_start, restore_training_state=restore_training_state)


def _bind_loaders(fit_loop: Any, listener: TrainerListener) -> None:
    def load_states() -> None:
        if listener.loaders_ready():
            type(fit_loop)._load_combined_loader_states(fit_loop)

    val_loop = fit_loop.epoch_loop.val_loop

    def setup_data() -> None:
        type(val_loop).setup_data(val_loop)
        listener.val_loaders_ready()

    vars(fit_loop)["_load_combined_loader_states"] = load_states
    vars(val_loop)["setup_data"] = setup_data


def _bind_epochs(trainer: Any, fit_loop: Any, listener: TrainerListener) -> None:
    def on_advance_start() -> None:
        listener.begin_epoch(trainer)
        type(fit_loop).on_advance_start(fit_loop)

    def on_advance_end() -> None:
        type(fit_loop).on_advance_end(fit_loop)
        listener.end_epoch(trainer)

    vars(fit_loop).update(on_advance_start=on_advance_start, on_advance_end=on_advance_end)


def _bind_batches(trainer: Any, epoch_loop: Any, listener: TrainerListener) -> None:
    def advance(data_fetcher: Any) -> None:
        if epoch_loop.restarting and trainer._holdfast_restored:
            set_restarting(trainer, False)  # a validation after the last batch was done before the save
        type(epoch_loop).advance(epoch_loop, data_fetcher)

    def on_advance_end(data_fetcher: Any) -> None:
        type(epoch_loop).on_advance_end(epoch_loop, data_fetcher)
        listener.end_batch(trainer)

    vars(epoch_loop).update(advance=advance, on_advance_end=on_advance_end)


def set_restarting(trainer: Any, restarting: bool) -> None:
    """Set on all training loops whether they go on amid an epoch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    inner = (epoch_loop.automatic_optimization, epoch_loop.manual_optimization, epoch_loop.val_loop)
    for loop in (trainer.fit_loop, epoch_loop, *inner):
        loop._restarting = restarting
