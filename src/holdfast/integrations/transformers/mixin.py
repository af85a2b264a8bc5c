"""`HoldfastMixin`: Trainer's methods for saving and resuming, by Holdfast.

It stands right above Trainer, below the overrides of subclasses: `_save_checkpoint` of TRL, which writes a model
card and calls Trainer's, works as before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from transformers import Trainer

from holdfast.core.errors import InvalidArgument
from holdfast.integrations.transformers.hub_push import push_step, without_steps
from holdfast.integrations.transformers.model_folder import save_model_folder
from holdfast.integrations.transformers.plugin import OlderStep, TrainerPlugin
from holdfast.integrations.transformers.plugin_options import PluginOptions
from holdfast.integrations.transformers.refusals import refuse_trials, require_supported
from holdfast.integrations.transformers.trainer_record import exportable_states

_NOWHERE = ".holdfast-no-folder"  # no folder checkpoint-N is there


class HoldfastMixin(Trainer):
    """A Trainer that saves and resumes with Holdfast: `class MyTrainer(SFTTrainer, HoldfastMixin)`.

    `holdfast_options` are the keywords of `attach`, with `root`. Use `attach` for a trainer of another class.
    """

    holdfast_options: ClassVar[Mapping[str, Any]] = {}
    holdfast_plugin: TrainerPlugin | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_plugin(self, **self.holdfast_options)

    @property
    def _plugin(self) -> TrainerPlugin:
        assert self.holdfast_plugin is not None
        return self.holdfast_plugin

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:
        """Train, from the newest step if `resume_from_checkpoint` is True and there is one; a path names a step."""
        if trial is not None:
            refuse_trials()
        with self._plugin.run(resume_from_checkpoint) as folder:
            return super().train(resume_from_checkpoint=folder, ignore_keys_for_eval=ignore_keys_for_eval)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: trials are runs of their own."""
        refuse_trials()

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        given = {"batch_size": batch_size, "args": args, "trial": trial, "ignore_keys_for_eval": ignore_keys_for_eval}
        try:
            return super()._inner_training_loop(**given, resume_from_checkpoint=resume_from_checkpoint)
        except OlderStep:
            return super()._inner_training_loop(**given, resume_from_checkpoint=resume_from_checkpoint)

    # Resume.

    def _init_training_state(
        self,
        max_steps: Any,
        num_update_steps_per_epoch: Any,
        num_train_epochs: Any,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> Any:
        epoch, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        return self._plugin.begin_at(epoch, batches, num_update_steps_per_epoch)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return Trainer's loader; the seed of its workers is not drawn once more by a resumed run."""
        loader = super().get_eval_dataloader(eval_dataset)
        self._plugin.epoch_begin.begin_evaluation(loader)
        return loader

    def _load_callback_state(self) -> None:
        """Restore callbacks that can say their state, such as EarlyStoppingCallback.

        Trainer does so only with restore_callback_states_from_checkpoint, and makes the callbacks anew, with their old
        arguments. Otherwise the arguments of this start stay, and what was counted goes on.
        """
        if self.args.restore_callback_states_from_checkpoint or self._plugin.resume is None:
            super()._load_callback_state()
            return
        seen: dict[str, int] = {}
        saved: Any = self.state.stateful_callbacks
        for callback in exportable_states(self.callback_handler.callbacks):
            name = type(callback).__name__
            stored = saved.get(name, [])
            states = stored if isinstance(stored, list) else [stored]
            index = seen[name] = seen.get(name, -1) + 1
            if index < len(states):
                for attribute, value in states[index].get("attributes", {}).items():
                    setattr(callback, attribute, value)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._plugin.is_own(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._plugin.is_own(checkpoint):
            self._plugin.restore()  # the model and everything else too: all of it is live and wrapped now
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if not self._plugin.is_own(checkpoint):
            super()._load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._plugin.is_own(checkpoint):
            self._plugin.apply_streams()
        else:
            super()._load_rng_state(checkpoint)

    def _load_best_model(self) -> None:
        self._plugin.load_best()

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        if skip_scheduler and self._plugin.resume is not None:
            return {}  # eval_on_start: this run has begun before, and has evaluated then
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    # Save.

    def _maybe_log_save_evaluate(
        self,
        tr_loss: torch.Tensor,
        grad_norm: Any,
        model: Any,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        self._plugin.before_save(start_time)
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, trial, epoch, ignore_keys_for_eval, start_time, learning_rate=learning_rate
        )
        self._plugin.after_save()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.store_flos()
        self._plugin.save()
        if type(self)._save_checkpoint is not HoldfastMixin._save_checkpoint:
            self._plugin.make_extras_folder()

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        start_time = self._plugin.finish(start_time)
        self._plugin.ending = True
        try:
            return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[no-untyped-call]
        finally:
            self._plugin.ending = False

    def _get_output_dir(self, trial: Any) -> str:
        """Return output_dir; at the end of training, where Trainer deletes checkpoint-N folders, one without any."""
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, _NOWHERE) if self._plugin.ending else folder

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`. Under FSDP2 every rank writes its part, and nothing is gathered."""
        if not self.is_fsdp_enabled:
            super().save_model(output_dir, _internal_call)
            return
        target = self.args.output_dir if output_dir is None else output_dir
        save_model_folder(self, str(target), self._plugin.files.read(), self._plugin.deadline_s)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # The hub.

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Push a committed step."""
        push_step(self, checkpoint_folder)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the model and its card; the steps in output_dir are left out."""
        with without_steps():
            return super().push_to_hub(*args, **kwargs)


def add_plugin(trainer: Any, root: Any = None, **options: Any) -> None:
    """Give a trainer, whose class has the mixin, its plug-in."""
    if getattr(trainer, "holdfast_plugin", None) is not None:
        raise InvalidArgument("attach: Holdfast is attached to this trainer already")
    require_supported(trainer)
    trainer.holdfast_plugin = TrainerPlugin(trainer, plugin_options(root, **options))


def plugin_options(root: Any = None, **options: Any) -> PluginOptions:
    """Return the options of `attach`; what is not its own goes to the Checkpointer."""
    own = {name: options.pop(name) for name in ("overwrite", "keep", "when") if name in options}
    carry = options.pop("carry", ())
    names = (carry,) if isinstance(carry, str) else tuple(carry)
    return PluginOptions(root, names, **own, checkpointer=options)
