"""`TrainerPlugin`, the state of an attached Trainer: its Checkpointer, the point it resumes from, what it saves."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from holdfast.adapters.comm import current_ranks
from holdfast.api import load, open_checkpoint
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import Damaged, InvalidArgument, Mismatch, NotFound
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.options import DEADLINE_S
from holdfast.engine.peek import peek_at
from holdfast.engine.save_handle import SaveHandle
from holdfast.integrations.transformers.carried_values import CarriedValues
from holdfast.integrations.transformers.committed_saves import CommittedSaves
from holdfast.integrations.transformers.data_position import StepCounter, data_layout, require_same_data
from holdfast.integrations.transformers.epoch_begin import EpochBegin
from holdfast.integrations.transformers.finished_run import log_finished, log_resumed, why_finished
from holdfast.integrations.transformers.plugin_options import PluginOptions, save_metrics
from holdfast.integrations.transformers.processing_files import ProcessingFiles
from holdfast.integrations.transformers.refusals import require_supported, warn_of_pending_gradients
from holdfast.integrations.transformers.resume_point import (
    RECORD,
    STATE_FILE,
    NativeCheckpoint,
    ResumePoint,
    named_point,
    native_checkpoints,
    resume_point,
    step_path,
)
from holdfast.integrations.transformers.trainer_hooks import TrainerHooks, defer_on_save
from holdfast.integrations.transformers.trainer_record import LogHistory, inner_optimizer, state_fields, state_json
from holdfast.random_streams import RandomStreams


class OlderStep(Exception):
    """The step whose counters Trainer has read is damaged, and an older one was restored: begin again with that."""


class TrainerPlugin:
    """The work of Holdfast for one Trainer. The mixin calls it from Trainer's methods, on every rank."""

    def __init__(self, trainer: Any, options: PluginOptions) -> None:
        self.trainer = trainer
        self.options = options
        self.resume: ResumePoint | None = None
        self.files = ProcessingFiles(trainer)
        self._checkpointer: Checkpointer | None = None
        self._committed: CommittedSaves | None = None
        self._streams = RandomStreams(late=True)
        self._carried = CarriedValues(trainer, options.carry)
        self.counter = StepCounter()
        self.epoch_begin = EpochBegin(trainer)
        self._log = LogHistory(trainer)
        self._folder = ""  # given to Trainer as resume_from_checkpoint: holds nothing but its state
        self._loaded_step: int | None = None
        self._saved_step: int | None = None
        self._steps_per_epoch: int | None = None
        self._checked = self._prepared = False
        self.ending = False
        defer_on_save(trainer.callback_handler, self)
        trainer.add_callback(TrainerHooks(self))

    @property
    def deadline_s(self) -> float:
        return float(self.options.checkpointer.get("deadline_s", DEADLINE_S))

    def ranks(self) -> Ranks:
        return current_ranks(self.deadline_s)

    # Begin and end.

    @contextmanager
    def run(self, request: Any) -> Iterator[str | None]:
        """Yield what Trainer gets as resume_from_checkpoint; close the Checkpointer afterwards."""
        try:
            yield self._begin(request)
        finally:
            self._close()

    def _begin(self, request: Any) -> str | None:
        require_supported(self.trainer)
        self._carried.forget()
        self.trainer.current_flos = 0  # of steps that an interrupted call of train() did and did not save
        self._log = LogHistory(self.trainer)
        self._streams = RandomStreams(late=True)
        self.epoch_begin = EpochBegin(self.trainer)
        self.resume, self._loaded_step, self._saved_step = None, None, None
        self._checked = self._prepared = False
        if not request and not self.options.saves(self.trainer.args):
            return None
        self._open()
        found = self._find(request)
        if isinstance(found, NativeCheckpoint):
            return found.path
        self.resume = found
        return None if found is None else self._write_folder(found)

    def _open(self) -> None:
        args, given = self.trainer.args, self.options
        root = given.root_of(args)
        self._checkpointer = Checkpointer(root, keep=given.keep_of(args), when=given.when, **given.checkpointer)
        self._committed = CommittedSaves(self.trainer, self._checkpointer.storage)
        self._committed.warn_of_addresses()

    def _find(self, request: Any) -> ResumePoint | NativeCheckpoint | None:
        """Return where to go on from; None to begin. Collective."""
        output_dir = self.trainer.args.output_dir
        if request and request is not True:
            point = named_point(self.ranks(), self._open_checkpointer.storage, output_dir, request)
            if isinstance(point, NativeCheckpoint) or point.elsewhere:
                self._require_unused(f"resume_from_checkpoint={str(request)!r}")
            return point
        if not request:
            self._require_unused("train() without resume_from_checkpoint")
            return None
        found = self._open_checkpointer.peek()
        if found is not None:
            return resume_point(found)
        native = run_on_all_ranks(self.ranks(), lambda: native_checkpoints(output_dir))[0]
        if native:
            raise InvalidArgument(
                f"{output_dir} has {native[-1]} of Trainer and no step of Holdfast: pass resume_from_checkpoint="
                f"{str(Path(output_dir) / native[-1])!r} to go on from it, or choose another output_dir to begin"
            )
        return None

    def _require_unused(self, call: str) -> None:
        """Refuse to begin in a root with steps: a restart would take the older run's. Collective."""
        found = self._open_checkpointer.peek()
        if found is None:
            return
        if not self.options.overwrite:
            raise InvalidArgument(
                f"{self._open_checkpointer.storage.name} holds step {found.step} of an earlier run, and {call} would "
                "mix two runs: pass resume_from_checkpoint=True to go on from it, choose another output_dir (or root), "
                "or attach(..., overwrite=True) to delete its steps"
            )
        storage = self._open_checkpointer.storage
        self._close()

        def remove() -> None:
            if self.ranks().rank == 0:
                for entry in committed_steps(storage):
                    storage.remove(entry.folder)

        run_on_all_ranks(self.ranks(), remove)
        self._open()

    def _close(self) -> None:
        checkpointer, self._checkpointer, self._committed = self._checkpointer, None, None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
        if checkpointer is not None:
            checkpointer.close()

    @property
    def _open_checkpointer(self) -> Checkpointer:
        if self._checkpointer is None:
            raise InvalidArgument("Holdfast saves and restores within trainer.train() only")
        return self._checkpointer

    # Restore.

    def _write_folder(self, point: ResumePoint) -> str:
        """Write a folder with nothing but trainer_state.json, of this rank alone: Trainer reads its counters there."""
        if not self._folder:
            self._folder = tempfile.mkdtemp(prefix="holdfast-trainer-state-")
        (Path(self._folder) / STATE_FILE).write_text(state_json(point.record["fields"]), encoding="utf-8")
        self._copy_extras(point.step)
        return self._folder

    def _copy_extras(self, step: int) -> None:
        """Give overrides of Trainer's loading methods what their _save_checkpoint wrote into checkpoint-N."""
        extras = self._extras_folder(step)
        if extras.is_dir() and not (extras / STATE_FILE).exists():
            shutil.copytree(extras, self._folder, dirs_exist_ok=True)

    def is_own(self, folder: str | None) -> bool:
        """Return True if Trainer was asked to load the folder that stands for a step of Holdfast."""
        return bool(folder) and folder == self._folder

    def begin_at(self, epoch: int, batches: int, steps_per_epoch: int) -> tuple[int, int]:
        """Return the epoch to begin with and its batches that were used, which Trainer takes to be those given.

        Raises Mismatch if the counters do not name the same samples as when they were saved.
        """
        self._steps_per_epoch = steps_per_epoch
        args, accumulation = self.trainer.args, self.trainer.args.gradient_accumulation_steps
        steps = batches // accumulation
        if self.resume is not None:
            live = data_layout(self.trainer, steps_per_epoch)
            require_same_data(self.resume.record["data"], live, ignore_data_skip=args.ignore_data_skip)
            self._note_best(self.trainer.state)
            if not args.ignore_data_skip:
                epoch, steps = self.resume.record["position"]["epoch"], self.resume.record["position"]["steps"]
            if why_finished(self.trainer):  # Trainer would look at that after one step more
                epoch, steps = self.trainer.state.num_train_epochs, 0
        self.counter.start(epoch, steps)
        return epoch, steps * accumulation

    def restore(self) -> None:
        """Load everything into the live objects: Trainer has just wrapped the model and made the optimizer."""
        assert self.resume is not None
        state = self._state(model_only=False)
        if self.resume.elsewhere:
            load(self.resume.path, state)
            step: int | None = self.resume.step
        else:
            step = self._open_checkpointer.restore(state, step=self.resume.step if self.resume.chosen else None)
        if step != self.resume.step:
            self._resume_older(step)
        self._loaded_step = step
        log_resumed(self.trainer, self.resume.step, self.resume.path)
        history = self.ranks().gather(self._log.loaded if self.trainer.is_world_process_zero() else None)[0]
        self.trainer.state.log_history = json.loads(history or "[]")

    def _resume_older(self, step: int | None) -> None:
        report = self._open_checkpointer.last_report
        if step is None or report is None or (self.resume is not None and step > self.resume.step):
            raise Damaged(f"step {self.resume and self.resume.step} cannot be restored, and no step before it can")
        self.resume = resume_point(peek_at(self.ranks(), lambda: open_checkpoint(report.path), None, verify=False))
        self._write_folder(self.resume)
        raise OlderStep

    def apply_streams(self) -> None:
        """Set the random streams: Trainer calls at the right time, before an epoch or after its first batch."""
        self._streams.apply()
        if not self.counter.steps:
            self.epoch_begin.note()

    def begin_epoch(self, loader: Any) -> None:
        """Keep what the order of the epoch will be drawn from, or set it again amid the epoch."""
        self.epoch_begin.begin(loader, amid=self.counter.begin_epoch())

    def begin_training(self) -> None:
        """Set the values that Trainer has just zeroed, and say so if nothing will be trained."""
        self._carried.apply()
        if self.resume is not None:
            log_finished(self.trainer)

    def require_loaded(self) -> None:
        """Raise Mismatch at the first step if what was asked for was not loaded; after that do nothing."""
        if self._checked:
            return
        self._checked = True
        if self.resume is None:
            return
        asked, found = self.resume.step, self.trainer.state.global_step
        if self._loaded_step != asked or found != asked:
            loaded = "nothing" if self._loaded_step is None else f"step {self._loaded_step}"
            raise Mismatch(
                f"training was to go on from step {asked} of {self.resume.path}, but {loaded} was loaded and the "
                f"trainer is at step {found}: does {type(self.trainer).__name__} override _init_training_state or "
                "_load_optimizer_and_scheduler without calling Trainer's?"
            )

    # Save.

    def _state(self, *, model_only: bool) -> dict[str, Any]:
        trainer = self.trainer
        record = {
            "fields": state_fields(trainer),
            "data": data_layout(trainer, self._steps_per_epoch),
            "position": self.counter.position(trainer.control, self._steps_per_epoch),
            "model_only": model_only,
        }
        state = {"model": trainer.model, RECORD: record, "trainer_log": self._log}
        if model_only:
            return state
        state |= {"optimizer": inner_optimizer(trainer.optimizer), "random": self._streams}
        state |= {"trainer_values": self._carried, "trainer_epoch": self.epoch_begin}
        if trainer.lr_scheduler is not None:
            state["scheduler"] = trainer.lr_scheduler
        scaler = getattr(trainer.accelerator, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            state["scaler"] = scaler
        return state

    def save(self) -> None:
        """Save the current step, as TrainingArguments asked for. Returns at once. Collective."""
        self._finish_and_report()
        trainer = self.trainer
        if self._checkpointer is None and trainer.is_in_train:  # save_strategy is "no", and a callback asked for a save
            self._open()
            self._require_unused("a save of a callback, in a run that began without resume_from_checkpoint,")
        checkpointer, step = self._open_checkpointer, trainer.state.global_step
        if self.counter.has_ended:
            warn_of_pending_gradients(trainer)
        self._note_best(trainer.state)
        state = self._state(model_only=trainer.args.save_only_model)
        metrics = save_metrics(trainer.args, trainer.state)
        files = self._files(state[RECORD]) if trainer.is_world_process_zero() else None
        self._remember(step, checkpointer.save(step, state, metrics=metrics, files=files))

    def _files(self, record: dict[str, Any]) -> dict[str, bytes]:
        best = {"best_model_checkpoint": self.trainer.state.best_model_checkpoint}  # for programs that read the file
        text = state_json(record["fields"] | best, self._log.text())
        return self.files.read() | {STATE_FILE: text.encode()}

    def _remember(self, step: int, handle: SaveHandle) -> None:
        self._saved_step = step
        if self._committed is not None:
            self._committed.add(handle, step_path(self._open_checkpointer.storage, step))

    def _extras_folder(self, step: int) -> Path:
        return Path(self.trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"

    def make_extras_folder(self) -> None:
        """Make the folder that an override of _save_checkpoint may write into."""
        if self.trainer.args.should_save:
            self._extras_folder(self.trainer.state.global_step).mkdir(parents=True, exist_ok=True)

    def remove_extras_folder(self, step: int) -> None:
        """Remove the folder again if nothing was written into it."""
        folder = self._extras_folder(step)
        if self.trainer.args.should_save and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()

    def has_saved(self, step: int) -> bool:
        """Return True if this step was saved by Holdfast."""
        return self._saved_step == step

    def before_save(self, start_time: float) -> None:
        """Called after each step, before Trainer logs, evaluates and saves. Collective."""
        self._carried.started_at = start_time
        checkpointer, committed = self._checkpointer, self._committed
        if checkpointer is None or committed is None:
            return
        if committed.is_waiting:
            committed.poll(self.ranks())
        if not self._prepared:  # the optimizer has its state now
            self._prepared = True
            if self.resume is None:
                checkpointer.prepare(self._state(model_only=self.trainer.args.save_only_model))

    def after_save(self) -> None:
        """Save if an occasion of `when=` is due, and end training after a signal. Collective."""
        trainer, checkpointer = self.trainer, self._checkpointer
        step = trainer.state.global_step
        if checkpointer is None or self.options.when is None or self._saved_step == step:
            return
        state = self._state(model_only=trainer.args.save_only_model)
        metrics = save_metrics(trainer.args, trainer.state)

        def fill(folder: str) -> None:
            for name, content in self._files(state[RECORD]).items():
                path = Path(folder) / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)

        handle = checkpointer.save_if_due(step, state, metrics=metrics, files=fill)
        if handle is not None:
            self._remember(step, handle)
        if checkpointer.preempted:
            trainer.control.should_training_stop = True

    def finish(self, start_time: float) -> float:
        """Wait for the last save and report it; return when the run would have started without interruptions."""
        if self._checkpointer is not None:
            self._checkpointer.finish()
        self._finish_and_report()
        return start_time - self._carried.earlier_s

    def _finish_and_report(self) -> None:
        if self._checkpointer is not None and self._committed is not None and self._committed.is_waiting:
            self._checkpointer.finish()
            self._committed.report_all(self.ranks())

    # The best step.

    def _note_best(self, state: Any) -> None:
        """Name the folder of the best step: Trainer does so only for a folder that exists already."""
        if state.best_global_step and self._checkpointer is not None:
            state.best_model_checkpoint = step_path(self._checkpointer.storage, state.best_global_step)

    def load_best(self) -> None:
        """Load the model of the best step, in place and as it is sharded. Collective."""
        state = self.trainer.state
        try:
            load(state.best_model_checkpoint, {"model": self.trainer.model}, deadline_s=self.deadline_s)
        except NotFound as error:
            if self.trainer.is_world_process_zero():
                warn(f"the best model, of step {state.best_global_step}, was not loaded, the last one stays: {error}")
