"""Work that needs a finished folder: on_save of callbacks and pushes to the hub, once a step is committed.

Every rank calls on_save at the same step of training, as Trainer does, so that a callback may use collectives. The
ranks ask each other after 1, 2, 4, ... steps whether all know of the commit; without such work nobody asks.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy

from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.save_handle import SaveHandle
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage

_COPY_BYTES = 16 << 20  # smaller files are copied: a callback may write over them


@dataclass(frozen=True, slots=True)
class UnreportedSave:
    """A save whose callbacks wait for its commit, with the trainer's state at the save."""

    handle: SaveHandle
    state: Any
    path: str


class CommittedSaves:
    """Calls on_save and pushes for each committed save, in order, on every rank."""

    def __init__(self, trainer: Any, storage: Storage) -> None:
        self._trainer = trainer
        self._local = isinstance(storage, LocalStorage)
        self._waiting: deque[UnreportedSave] = deque()
        self._polled = 0  # calls of `poll` since the last report
        self._reporting = False

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, handle: SaveHandle, path: str) -> None:
        """Remember a save that has just begun, if there is anything to do once it is committed."""
        if self._callbacks() or self._pushes:
            state = copy.copy(self._trainer.state)
            state.log_history = list(state.log_history)
            self._waiting.append(UnreportedSave(handle, state, path))
            self._polled = 0

    def poll(self, ranks: Ranks) -> None:
        """Report what is committed by now; called after every step. Collective."""
        if not self._waiting:
            return
        self._polled += 1
        if ranks.world > 1 and self._polled & (self._polled - 1):
            return
        known = 0
        for save in self._waiting:
            if not save.handle.done():
                break
            known += 1
        self._report(ranks, -ranks.all_max([-known])[0])

    def report_all(self, ranks: Ranks) -> None:
        """Report every save that waits: their writes are over. Collective."""
        self._report(ranks, len(self._waiting))

    def _report(self, ranks: Ranks, count: int) -> None:
        if count <= 0:
            return
        saves = [self._waiting.popleft() for _ in range(count)]
        self._polled = 0
        missing = ranks.all_max([int(_has_failed(save.handle)) for save in saves])
        for save, failed in zip(saves, missing, strict=True):
            if not failed:
                self._report_one(ranks, save)

    def _report_one(self, ranks: Ranks, save: UnreportedSave) -> None:
        trainer = self._trainer
        if self._callbacks():
            link = Path(trainer.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{save.state.global_step}"
            with self._linked(ranks, save.path, link):
                control = trainer.callback_handler.call_event("on_save", trainer.args, save.state, trainer.control)
                trainer.control = control
        if self._pushes:
            current, trainer.state = trainer.state, save.state
            try:
                trainer._push_from_checkpoint(save.path)
            finally:
                trainer.state = current

    @contextmanager
    def _linked(self, ranks: Ranks, path: str, link: Path) -> Iterator[None]:
        """Show a step as output_dir/checkpoint-N while callbacks run: they look for it under this name."""
        made: list[Path] = []
        if self._local:
            run_on_all_ranks(ranks, lambda: made.extend(link_folder(path, link)) if ranks.rank == 0 else None)
        try:
            yield
        finally:
            if self._local:
                ranks.gather(None)  # other ranks may still read
                unlink_folder(made, link)

    def _callbacks(self) -> list[Any]:
        """Return the callbacks that have an on_save of their own."""
        callbacks = self._trainer.callback_handler.callbacks
        return [one for one in callbacks if getattr(type(one), "on_save", None) is not TrainerCallback.on_save]

    @property
    def _pushes(self) -> bool:
        args = self._trainer.args
        return bool(args.push_to_hub) and args.hub_strategy != HubStrategy.END

    def warn_of_addresses(self) -> None:
        """Warn of callbacks that look for a folder where the steps are objects in a store."""
        if not self._local and self._callbacks() and self._trainer.is_world_process_zero():
            names = ", ".join(sorted({type(one).__name__ for one in self._callbacks()}))
            warn(f"{names}: on_save finds no folder checkpoint-N, because the root is not a local folder")


def _has_failed(handle: SaveHandle) -> bool:
    return not handle.done() or handle.error is not None or handle.skipped


def link_folder(path: str, link: Path) -> list[Path]:
    """Fill a folder with the files of a step: small ones as copies, large ones as links. Return what was made.

    Nothing that is written into the folder reaches the step, unless a callback writes into a large tensor file.
    """
    made = []
    for source in sorted(Path(path).rglob("*")):
        target = link / source.relative_to(path)
        if source.is_dir() or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.stat().st_size <= _COPY_BYTES:
            shutil.copyfile(source, target)
        else:
            _link(source, target)
        made.append(target)
    return made


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        target.symlink_to(source.resolve())


def unlink_folder(made: list[Path], link: Path) -> None:
    """Remove what `link_folder` made. What a callback wrote stays, with its folder."""
    for target in made:
        target.unlink(missing_ok=True)
    folders = {folder for target in made for folder in target.parents if folder == link or link in folder.parents}
    for folder in sorted(folders, key=lambda one: len(one.parts), reverse=True):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
