"""`CheckpointCallback`: a ModelCheckpoint whose checkpoints are Holdfast's, exact to the last random number."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from holdfast import keep
from holdfast.api import load
from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.core.names import MANIFEST, folder_step, step_folder
from holdfast.integrations.lightning.bound_methods import bind, set_restarting
from holdfast.integrations.lightning.epoch_metrics import RestoredMeans, epoch_metrics, restore_epoch_metrics
from holdfast.integrations.lightning.run_record import (
    RunRecord,
    lightning_checkpoint,
    live_objects,
    require_loaded,
    require_strategy,
    restore_parts,
    saved_model,
)
from holdfast.integrations.lightning.train_loaders import TrainLoaders
from holdfast.integrations.lightning.val_loaders import ValLoaders
from holdfast.random_streams import RandomStreams

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import ModelCheckpoint as _Base
else:
    _Base = object  # lightning.pytorch and pytorch_lightning have a ModelCheckpoint each


class CheckpointCallback(_Base):
    """A ModelCheckpoint that saves in the background and resumes exactly.

        trainer = Trainer(callbacks=[HoldfastCheckpoint("runs/a", every_n_train_steps=500)])
        trainer.fit(module, ckpt_path="last")  # the first start, and every restart

    Triggers, `monitor`, `mode`, `save_top_k` and `save_last` are those of ModelCheckpoint. Every triggered step is
    saved; `save_top_k` says which are kept beside the newest, `keep` replaces it. `when` adds occasions, such as
    `holdfast.when.preempted()`. `model` names the part of the LightningModule that is saved as "model", such as
    `lambda module: module.model` for `from_pretrained`. `extra` adds entries to the state.
    `replay` reads the used batches of an epoch again, so that random numbers drawn in data workers go on
    exactly; by default they are left out unread.
    `options` are those of `holdfast.Checkpointer`, which is `checkpointer` while a Trainer runs.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        monitor: str | None = None,
        mode: str = "min",
        save_top_k: int = 1,
        save_last: bool | None = None,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | None = None,
        save_on_train_epoch_end: bool | None = None,
        verbose: bool = False,
        keep: keep.Policy | None = None,
        when: Any = None,
        model: Callable[[Any], Any] | None = None,
        extra: MutableMapping[str, Any] | None = None,
        replay: bool = False,
        **options: Any,
    ) -> None:
        refused = sorted(options.keys() & _REFUSED.keys())
        if refused:
            raise Unsupported(f"{refused[0]}: {_REFUSED[refused[0]]}")
        if when is not None and (every_n_train_steps, every_n_epochs, train_time_interval) == (None, None, None):
            every_n_epochs = 0  # by default it would be 1
        self.root = os.fspath(root)
        super().__init__(
            dirpath=None if "://" in self.root else self.root,  # Lightning would look for a file system of its own
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            every_n_train_steps=every_n_train_steps,
            every_n_epochs=every_n_epochs,
            train_time_interval=train_time_interval,
            save_on_train_epoch_end=save_on_train_epoch_end,
            verbose=verbose,
        )
        self.dirpath = self.root = os.fspath(self.dirpath or self.root)
        self.checkpointer: Checkpointer | None = None
        self._options = {"keep": keep or self._kept(), "when": when} | options
        self._model = model
        self._replay = replay
        self._extra: MutableMapping[str, Any] = {} if extra is None else extra
        self._streams = RandomStreams(late=True)
        self._record = RunRecord()
        self._loaders: TrainLoaders | None = None
        self._val_loaders: ValLoaders | None = None
        self._due: Mapping[str, Any] | None = None  # the metrics of a step that is to be saved
        self._path: str | None = None  # that was asked for
        self._loaded: dict[str, Any] | None = None
        self._loaded_step = 0
        self._means: RestoredMeans | None = None
        self._metrics_to_restore: Mapping[str, Any] | None = None

    def _kept(self) -> keep.Policy | None:
        """Return what save_top_k keeps; the newest step is always kept."""
        if self.save_top_k == -1:
            return None
        if self.monitor is None or self.save_top_k == 0:
            return keep.last(1)
        return keep.best(self.save_top_k, self.monitor, self.mode)

    # Lightning's callback.

    @property
    def state_key(self) -> str:
        return "HoldfastCheckpoint"

    def state_dict(self) -> dict[str, Any]:
        """Return the scores of the best steps, as plain numbers."""
        return {
            "scores": {Path(folder).name: float(score) for folder, score in self.best_k_models.items()},
            "best": Path(self.best_model_path).name,
            "last": Path(self.last_model_path).name,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the best steps of a checkpoint; they are in this root."""
        self.best_k_models = {}
        for name, score in state["scores"].items():
            self._note_score(self._in_root(name), torch.tensor(score))
        self.best_model_path = self._in_root(state["best"]) if state["best"] else ""
        self.last_model_path = self._in_root(state["last"]) if state["last"] else ""

    def _in_root(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Take over the Trainer's saves and restores of Holdfast's checkpoints."""
        others = [other for other in trainer.callbacks if isinstance(other, CheckpointCallback) and other is not self]
        if others:
            raise Unsupported("two HoldfastCheckpoint in one Trainer: one run has one root; use keep= and when=")
        require_strategy(trainer.strategy)
        if self.checkpointer is None:
            self.checkpointer = Checkpointer(self.root, **self._options)
        self._loaders = TrainLoaders(trainer, self._streams, replay=self._replay)
        self._val_loaders = ValLoaders(trainer)
        trainer._holdfast_restored = False
        self._loaded = self._path = self._due = None
        bind(trainer, self)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Check once that what was asked for was loaded."""
        if self._path is not None:
            require_loaded(trainer, self._loaded, self._loaded_step)
            self._path = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step if `save_last` asks for one, and wait until it is durable."""
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._mark_due(trainer, self._monitor_candidates(trainer))
            self._save(trainer, is_amid=not _is_between_epochs(trainer))
        assert self.checkpointer is not None
        self.checkpointer.finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Release the writer once a stage is over; the next one starts it anew."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None

    def format_checkpoint_name(self, metrics: Any, *_: Any, **__: Any) -> str:
        """Return the folder of the step."""
        return self._folder(int(metrics["step"]))

    def _folder(self, step: int) -> str:
        return self._in_root(step_folder(step))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        """Return the root for `ckpt_path="last"`: the restore finds the newest good step in it, or begins."""
        if "://" not in self.root:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        return {self.root}

    # Saves: Lightning's triggers mark a step, which is saved once nothing of it is left to do.

    def _save_topk_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self.save_top_k != 0:
            self._mark_due(trainer, monitor_candidates)

    def _save_last_checkpoint(self, trainer: Any, monitor_candidates: dict[str, Any]) -> None:
        if self.save_last and self._last_global_step_saved != trainer.global_step:
            self._mark_due(trainer, monitor_candidates)

    def _mark_due(self, trainer: Any, candidates: Mapping[str, Any]) -> None:
        step = trainer.global_step
        self._due = self._metrics(candidates)
        self._last_global_step_saved = step
        self._last_checkpoint_saved = self.last_model_path = self._folder(step)
        if self.monitor is None:
            self.best_model_path = self._folder(step)
        elif self.monitor in self._due:
            self._note_score(self._folder(step), torch.as_tensor(self._due[self.monitor]))

    def _metrics(self, candidates: Mapping[str, Any]) -> dict[str, float]:
        """Return the scalars that were logged; `keep.best` finds the monitored one by its name."""
        found = {}
        for name, value in candidates.items():
            if name not in ("epoch", "step") and torch.is_tensor(value) and value.numel() == 1:
                found[name] = float(value)
        return found

    def _note_score(self, folder: str, score: torch.Tensor) -> None:
        """Note which steps are the best, as `keep.best` does: of equal ones the newest."""
        sign = 1 if self.mode == "min" else -1
        if not math.isfinite(float(score)):
            return
        self.current_score = score
        self.best_k_models[folder] = score
        newest = sorted(self.best_k_models.items(), reverse=True)  # the names sort by step
        ordered = sorted(newest, key=lambda item: sign * float(item[1]))
        ordered = ordered if self.save_top_k < 0 else ordered[: max(self.save_top_k, 1)]
        self.best_k_models = dict(ordered)
        self.best_model_path, self.best_model_score = ordered[0]
        self.kth_best_model_path, self.kth_value = ordered[-1]

    def end_batch(self, trainer: Any) -> None:
        """Save a step that is due.

        Amid an accumulation of gradients it waits for the optimizer; at the last batch it waits for the epoch's end.
        """
        loop = trainer.fit_loop.epoch_loop
        if trainer.fit_loop._should_accumulate() or trainer.fast_dev_run or loop._num_ready_batches_reached():
            return
        cut_short = loop.done  # the run ends, and not its epoch
        if cut_short and self._due is None and self._last_global_step_saved != trainer.global_step and self._saves:
            self._mark_due(trainer, self._monitor_candidates(trainer))
        if self._due is not None or self._options["when"] is not None:
            self._save(trainer, is_amid=True)

    @property
    def _saves(self) -> bool:
        return self.save_top_k != 0 or bool(self.save_last)

    def end_epoch(self, trainer: Any) -> None:
        """Save a step that became due at the end of its epoch."""
        if self._means is not None:
            self._means.end_epoch()
            self._means = None
        is_whole = trainer.fit_loop.epoch_loop._num_ready_batches_reached()
        if self._due is not None or (self._options["when"] is not None and is_whole and not trainer.fast_dev_run):
            self._save(trainer, is_amid=False)

    def _save(self, trainer: Any, *, is_amid: bool) -> None:
        assert self.checkpointer is not None
        step, due, self._due = trainer.global_step, self._due, None
        state = live_objects(trainer, self._record, self._streams, self._extra, self._model)
        self._record.capture = lambda: self._capture(trainer, is_amid=is_amid)
        try:
            if due is not None:
                self.checkpointer.save(step, state, metrics=due, files=_hparams(trainer))
            else:
                self.checkpointer.save_if_due(step, state)
        finally:
            self._record.capture = None
        trainer.should_stop = trainer.should_stop or self.checkpointer.preempted

    def _capture(self, trainer: Any, *, is_amid: bool) -> dict[str, Any]:
        assert self._loaders is not None and self._val_loaders is not None
        loop = trainer.fit_loop.epoch_loop
        used = int(loop.batch_progress.current.completed) if is_amid else 0
        return {
            "lightning": lightning_checkpoint(trainer),
            "is_amid": is_amid,
            "data": self._loaders.fields(used, is_amid=is_amid),
            "validation": self._val_loaders.fields(),
            "metrics": epoch_metrics(trainer, is_amid=is_amid),
        }

    # Restores.

    def takes(self, checkpoint_path: Any) -> bool:
        """Return True for the root, a step in it, and any other folder of Holdfast."""
        path = os.fspath(checkpoint_path)
        return self._step_of(path) is not None or self._is_root(path) or os.path.exists(os.path.join(path, MANIFEST))

    def _is_root(self, path: str) -> bool:
        if "://" in self.root:
            return path.rstrip("/") == self.root.rstrip("/")
        return os.path.realpath(path) == os.path.realpath(self.root)

    def _step_of(self, path: str) -> int | None:
        parent, _, name = path.rstrip("/").rpartition("/")
        return folder_step(name) if self._is_root(parent) else None

    def restore(self, trainer: Any, checkpoint_path: Any) -> bool:
        """Load a run to go on with, or for other stages than fit the model alone."""
        path = os.fspath(checkpoint_path)
        if trainer.state.fn.value != "fit":
            self._load_model(trainer, path)
            return True
        self._path = path
        objects = live_objects(trainer, self._record, self._streams, self._extra, self._model)
        state = dict(objects)
        assert self.checkpointer is not None
        if self._is_root(path) or self._step_of(path) is not None:
            found = self.checkpointer.restore(
                state, step=self._step_of(path), strict=trainer.lightning_module.strict_loading
            )
            if found is None:
                self._path = None
                return False
        else:
            load(path, state, strict=trainer.lightning_module.strict_loading)
        for name in self._extra:
            self._extra[name] = state[name]
        self._go_on(trainer, self._record.content)
        self._loaded, self._loaded_step = objects, trainer.global_step
        self._last_global_step_saved = trainer.global_step
        return True

    def _go_on(self, trainer: Any, content: Mapping[str, Any]) -> None:
        if not content:
            raise InvalidArgument("not a checkpoint of HoldfastCheckpoint: it has no entry of Lightning's loops")
        assert self._loaders is not None and self._val_loaders is not None
        restore_parts(trainer, content["lightning"])
        self._metrics_to_restore = content["metrics"]
        trainer._holdfast_restored = True
        is_amid = bool(content["is_amid"])
        self._loaders.resume_at(content["data"], is_amid=is_amid)
        if "validation" in content:
            self._val_loaders.resume_at(content["validation"])
        if not is_amid:
            set_restarting(trainer, False)

    def _load_model(self, trainer: Any, path: str) -> None:
        """Load the model for validate, test or predict."""
        assert self.checkpointer is not None
        self.checkpointer.finish()
        if self._is_root(path):
            found = self.checkpointer.peek()
            if found is None:
                raise NotFound(f"{self.root}: no checkpoint to load")
            path = found.path
        load(path, {"model": saved_model(trainer, self._model)}, strict=trainer.lightning_module.strict_loading)

    def loaders_ready(self) -> bool:
        """Take over the loaders; Lightning loads states into those that have one, amid an epoch."""
        assert self._loaders is not None
        return self._loaders.prepare()

    def val_loaders_ready(self) -> None:
        """Take over the validation loaders, and restore their generators."""
        assert self._val_loaders is not None
        self._val_loaders.prepare()

    def begin_epoch(self, trainer: Any) -> None:
        """Restore what the sanity check has changed, and the streams, unless the data is to find its position first."""
        assert self._loaders is not None and self._val_loaders is not None
        self._val_loaders.restore_generators()
        if self._metrics_to_restore is not None:
            self._means = restore_epoch_metrics(trainer, self._metrics_to_restore)
            self._metrics_to_restore = None
        if not self._loaders.is_resuming:
            self._streams.apply()


_REFUSED = {
    "save_weights_only": "a checkpoint has the whole state; its model-*.safetensors are the weights",
    "save_on_exception": "an exception leaves the state amid a step, which cannot be resumed exactly; use when=",
    "dirpath": "give the root as the first argument",
    "filename": "Holdfast names the folders by step",
    "enable_version_counter": "a step has one folder",
    "auto_insert_metric_name": "Holdfast names the folders by step",
}


def _hparams(trainer: Any) -> dict[str, str] | None:
    """Return the hyper-parameters of the module as a file to publish."""
    parameters = dict(trainer.lightning_module.hparams)
    return {"hparams.json": json.dumps(parameters, default=str, indent=1)} if parameters else None


def _is_between_epochs(trainer: Any) -> bool:
    total = trainer.fit_loop.epoch_progress.total
    return bool(total.completed == total.ready)
