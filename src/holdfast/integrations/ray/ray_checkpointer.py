"""`RayCheckpointer`: restores, saves in the background, and reports committed steps, in the train loop of a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import ray.train
from ray.train import Checkpoint as RayCheckpoint
from torch.nn.parallel import DistributedDataParallel

from holdfast.adapters.comm import current_ranks
from holdfast.api import load, open_checkpoint
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch, NotFound
from holdfast.core.names import step_folder
from holdfast.core.ranks import run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.extra_files import ExtraFiles
from holdfast.engine.options import DEADLINE_S
from holdfast.engine.save_handle import SaveHandle, check_step
from holdfast.integrations.ray.reported_steps import ReportedSteps, address, reported_step
from holdfast.integrations.ray.worker_run import WorkerRun
from holdfast.mapping.program import Mapping as Program
from holdfast.storage import shared_storage_at


@dataclass(slots=True)
class _Unreported:
    """A step that Ray does not know yet. One that was restored has no handle."""

    step: int
    metrics: Mapping[str, Any]
    handle: SaveHandle | None
    checkpoint: RayCheckpoint | None = None  # once it is committed; on rank 0
    problem: str = ""  # why Ray gets no checkpoint of it


class RayCheckpointer:
    """The checkpoints of a Ray Train run. Every worker creates one in its train loop.

        with RayCheckpointer(keep=holdfast.keep.last(3)) as ck:
            start = ck.restore(state) or 0
            for step in range(start + 1, steps + 1):
                ...
                if step % 500 == 0:
                    ck.save_and_report({"loss": loss}, step, state)

    `root` is by default the folder `holdfast` of the run, under RunConfig(storage_path). `options` are those of
    `holdfast.Checkpointer`, which is at hand as `checkpointer`. Ray reports are a barrier: every worker calls
    `save_and_report`, `finish` and `close` alike, as the `with` block does where no error ends it.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None, **options: Any) -> None:
        if options.get("when") is not None:
            raise InvalidArgument("when=: save_and_report saves whenever it is called; call it when a save is due")
        self._run = WorkerRun.current()
        self._options = options
        storage = shared_storage_at(self._run.root(root))
        self._reported = ReportedSteps(self._run, storage)
        self.checkpointer = Checkpointer(storage, **options)
        self._waits = options.get("on_busy", "wait") == "wait"
        self._deadline_s = options.get("deadline_s", DEADLINE_S)
        self._unreported: _Unreported | None = None
        self._loaded: dict[str, Any] | None = None  # the state of the last restore, unwrapped
        self._at: int | None = None  # the step that was restored, then those that are saved
        self._is_first = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.checkpointer.close()  # no report: the other workers may never come to theirs

    # Restore.

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        begin_from: RayCheckpoint | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> int | None:
        """Load the newest good step of this run, or `step`; return it, None if none exists. Collective.

        Ray starts the workers again after a failure, and the train loop begins with this. It asks Holdfast, not
        `ray.train.get_checkpoint()`, which may be older. `begin_from` is where a run without a step begins: the
        `result.checkpoint` of another run, on any number of workers, or the path of any checkpoint.
        `options` are those of `holdfast.Checkpointer.restore`.

        Raises NotFound if Ray knows a step and the root has none.
        """
        self._report()  # of a save before this restore
        asked = {name: _inner(value) for name, value in state.items()}
        found = self.checkpointer.restore(state, step=step, **options)
        known = self._agreed(reported_step(ray.train.get_checkpoint()))
        if found is None and known is not None:
            raise NotFound(
                f"step {known} was reported to Ray, and {self.checkpointer.storage.name} has no step: the root must "
                "be on storage that all nodes share; to begin anew, choose another RunConfig(name=...)"
            )
        if found is not None and (known is None or known < found):
            self._unreported = _Unreported(found, {}, None)
        elif found is not None and known is not None and found < known and step is None and self._run.rank == 0:
            warn(f"step {known} was reported to Ray and cannot be restored: goes on from step {found}")
        if found is None and begin_from is not None:
            found = self._begin_from(begin_from, state, options)
        self._loaded, self._at, self._is_first = asked, found, True
        return found

    def _begin_from(self, begin_from: Any, state: MutableMapping[str, Any], options: Mapping[str, Any]) -> int:
        """Load the checkpoint of another run, through what this run saves with; return its step."""
        path = address(begin_from) if isinstance(begin_from, RayCheckpoint) else begin_from
        given = {name: self._options[name] for name in ("hub_keys", "ties", "mesh") if name in self._options}
        mapping = _reversed(self._options.get("mapping"))
        patterns = {name: options.get(name) or self._options.get(name, ()) for name in ("only", "ignore")}
        rest = {name: value for name, value in options.items() if name not in ("only", "ignore", "move_damaged")}
        load(path, state, mapping=mapping, deadline_s=self._deadline_s, **given, **patterns, **rest)
        return open_checkpoint(path).step or 0

    def _agreed(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        return current_ranks(self._deadline_s).gather(value)[0]

    # Save.

    def save_and_report(
        self,
        metrics: Mapping[str, Any],
        step: int,
        state: MutableMapping[str, Any],
        *,
        files: ExtraFiles | None = None,
    ) -> SaveHandle:
        """Save the state as `step`, in the background, and report the save before it, which is committed by then.

        Reports come one save late. Each save is reported once, on every worker: with its metrics and its checkpoint,
        or without a checkpoint if it failed. Ray so never knows a step that is not durable. The last save is reported
        by `finish`, `close` or the end of the `with` block. Those metrics that are numbers are stored with the step
        too, for `keep.best`.
        With on_busy="skip" a save that is skipped is not reported.

        The first save raises InvalidArgument or Mismatch, on every worker, unless the state was restored before it,
        whole, and the loop goes on after the step that was restored.
        """
        shown = _plain(metrics)
        run_on_all_ranks(current_ranks(self._deadline_s), lambda: self._require_next(step, state))
        if self._unreported is not None:
            self._link(self._unreported, wait=self._waits)
        handle = self.checkpointer.save(step, state, metrics=_numbers(shown), files=files)
        if not handle.skipped:
            self._report()
            self._at, self._is_first = step, False
            self._unreported = _Unreported(step, shown, handle)
        return handle

    def _require_next(self, step: int, state: Mapping[str, Any]) -> None:
        """Raise unless the step follows the one before it, and the first state is what `restore` loaded."""
        if self._loaded is None:
            raise InvalidArgument(
                "restore(state) was not called: after a failure Ray starts the train loop again, and it would begin "
                "anew. Call it before the first step; it returns None at the first start"
            )
        if self._at is None:
            return
        if check_step(step) <= self._at:
            raise InvalidArgument(
                f"step {step} is saved after step {self._at}: the loop did not go on from what restore returned; "
                "write for example `for step in range(start + 1, steps + 1)`"
            )
        for name, value in state.items() if self._is_first else ():
            if name not in self._loaded:
                raise Mismatch(f"{name!r} is saved and was not in the state that was restored: it began anew")
            if _is_live(value) and _inner(value) is not self._loaded[name]:
                raise Mismatch(
                    f"{name!r} is not the {type(self._loaded[name]).__name__} that was restored: make it before "
                    "restore, and save the same object"
                )

    def _link(self, unreported: _Unreported, *, wait: bool) -> None:
        """On rank 0: give a committed step its folder for Ray, before a save after it lets `keep` remove the step.

        Raises nothing: the other workers wait for this one in the save and in the report that follow.
        """
        handle = unreported.handle
        if self._run.rank != 0 or unreported.checkpoint is not None:
            return
        try:
            if handle is None:
                self.checkpointer.finish()  # a state that was restored from memory is written first
            elif not (handle.done() or (wait and handle.wait())) or handle.error is not None:
                return
            committed = Checkpoint(self.checkpointer.storage, step_folder(unreported.step))
            if handle is None:
                unreported.metrics = committed.manifest.metrics
            unreported.checkpoint = self._reported.report_of(committed)
        except (HoldfastError, OSError) as error:
            unreported.problem = f"step {unreported.step} is reported to Ray without a checkpoint: {error}"

    def _report(self) -> None:
        """Report the save that is over. A barrier of Ray: every worker calls it, whatever became of the save."""
        unreported, self._unreported = self._unreported, None
        if unreported is None:
            return
        self._link(unreported, wait=True)
        ray.train.report(
            dict(unreported.metrics),
            checkpoint=unreported.checkpoint,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )
        if unreported.checkpoint is not None:
            unreported.problem = self._reported.free_removed(unreported.checkpoint)
        if unreported.problem:
            warn(unreported.problem)

    def finish(self) -> None:
        """Wait for the save in flight, and report it. A barrier: every worker calls it."""
        self._report()
        self.checkpointer.finish()

    def close(self) -> None:
        """Finish and report the save in flight, and release the writer. A barrier: every worker calls it."""
        self._report()
        self.checkpointer.close()


def _inner(value: Any) -> Any:
    """Unwrap DistributedDataParallel and torch.compile: the same module before and after `prepare_model`."""
    while isinstance(value, DistributedDataParallel) or hasattr(value, "_orig_mod"):
        value = value.module if isinstance(value, DistributedDataParallel) else value._orig_mod
    return value


def _is_live(value: Any) -> bool:
    return hasattr(value, "load_state_dict")


def _plain(metrics: Any) -> dict[str, Any]:
    """Return metrics as Ray takes them: tensors and arrays of one element become numbers."""
    if not isinstance(metrics, Mapping):
        raise InvalidArgument(f"metrics={metrics!r} must map names to values, such as {{'loss': 2.31}}")
    return {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics that can be stored with a step."""
    kinds = (int, float)
    return {name: value for name, value in metrics.items() if isinstance(value, kinds) and not isinstance(value, bool)}


def _reversed(mapping: Any) -> Any:
    """Return the mapping that loads a state which was saved through this one."""
    if mapping is None:
        return None
    if isinstance(mapping, Mapping) and "aoa_statements" not in mapping:
        return {name: Program.parse(program).reverse() for name, program in mapping.items()}
    return Program.parse(mapping).reverse()
