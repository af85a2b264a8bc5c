"""`ReportedSteps`: the folders that Ray's checkpoints name. Ray may delete them; the steps they stand for are safe.

Ray owns what is reported: it deletes by CheckpointConfig, and a run does not start again if one is missing. A step
belongs to Holdfast, which removes it by `keep`. So each report names a folder of its own, with hard links to the files
of the step. Where links cannot be made, the folder has the address of the step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs
from ray.train import Checkpoint as RayCheckpoint

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Unsupported
from holdfast.core.names import MANIFEST, folder_step, step_folder
from holdfast.integrations.ray.worker_run import WorkerRun
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage

_ADDRESS = "address.json"
_REMOVED = "removed.txt"
_PREFIX = "checkpoint-"
_FOLDER = re.compile(rf"{_PREFIX}(step-[0-9]+)(?:\.[0-9]+)?")
_ADDRESS_BYTES = 1 << 16


def address(checkpoint: RayCheckpoint) -> str:
    """Return the path or address of a checkpoint that was reported to Ray, for `holdfast.load` and `holdfast.open`."""
    files, path = checkpoint.filesystem, checkpoint.path
    noted = f"{path}/{_ADDRESS}"
    if files.get_file_info(noted).type == pyarrow.fs.FileType.File:
        with files.open_input_stream(noted) as stream:
            return str(json.loads(stream.read(_ADDRESS_BYTES))["address"])
    return str(path)


def reported_step(checkpoint: RayCheckpoint | None) -> int | None:
    """Return the step of a checkpoint that a RayCheckpointer reported; None for any other."""
    name = "" if checkpoint is None else Path(checkpoint.path).name
    match = _FOLDER.fullmatch(name)
    return folder_step(name if match is None else match[1])


class ReportedSteps:
    """Makes the folders of reports, on rank 0, and frees the space of those whose steps were removed."""

    def __init__(self, run: WorkerRun, storage: SharedStorage) -> None:
        if run.files is None and not isinstance(storage, LocalStorage):
            raise Unsupported(f"Ray's local mode, and the root {storage.name}: give a folder of this host")
        self._run = run
        self._storage = storage
        self._linked: set[str] | None = None  # folders with links; None: not looked for yet

    def report_of(self, committed: Checkpoint) -> RayCheckpoint:
        """Return a checkpoint of Ray for a committed step; raises OSError or HoldfastError if that fails."""
        if self._run.files is None:  # local mode: nothing deletes
            return RayCheckpoint(committed.path)
        folder = self._linked_folder(committed) if self._can_link() else None
        return RayCheckpoint(folder or self._noted_folder(committed), filesystem=self._run.files)

    def _can_link(self) -> bool:
        return self._run.is_local and isinstance(self._storage, LocalStorage)

    def _linked_folder(self, committed: Checkpoint) -> str | None:
        """Make a folder of hard links, whole or not at all; return None where the file system has none."""
        source = Path(committed.path)
        for folder in self._names(committed):
            if _is_same_step(source, Path(folder)):
                return folder  # made by a life of this run that ended before the report
            if os.path.lexists(folder):
                continue
            making = f"{folder}.making"
            shutil.rmtree(making, ignore_errors=True)
            with committed.held():
                linked = _link_files(source, Path(making))
            if not linked:
                shutil.rmtree(making)
                return None
            os.rename(making, folder)
            self._known_links().add(folder)
            return folder
        raise AssertionError("unreachable: the names do not end")

    def _noted_folder(self, committed: Checkpoint) -> str:
        """Make a folder that holds the address of the step."""
        files = self._run.files
        assert files is not None
        where = f"{self._storage.address}/{committed.folder}"
        for folder in self._names(committed):
            if files.get_file_info(folder).type != pyarrow.fs.FileType.NotFound:
                continue
            files.create_dir(folder)
            with files.open_output_stream(f"{folder}/{_ADDRESS}") as stream:
                stream.write(json.dumps({"address": where, "step": committed.step}).encode())
            return folder
        raise AssertionError("unreachable: the names do not end")

    def _names(self, committed: Checkpoint) -> Iterator[str]:
        """Yield folders to try: a step that was saved again gets another one, because Ray knows the first."""
        assert committed.step is not None
        first = f"{self._run.experiment}/{_PREFIX}{step_folder(committed.step)}"
        yield first
        number = 1
        while True:
            yield f"{first}.{number}"
            number += 1

    def _known_links(self) -> set[str]:
        if self._linked is None:
            assert self._run.experiment is not None
            names = [name for name in os.listdir(self._run.experiment) if _FOLDER.fullmatch(name)]
            folders = [f"{self._run.experiment}/{name}" for name in names]
            self._linked = {folder for folder in folders if os.path.lexists(f"{folder}/{MANIFEST}")}
        return self._linked

    def free_removed(self, newest: RayCheckpoint) -> str:
        """Empty the folders of steps that `keep` removed: their links hold the space of the files. Return a problem.

        With CheckpointConfig(num_to_keep) Ray deletes folders itself, and those that it keeps stay whole.
        """
        if not self._can_link() or self._run.ray_keeps is not None:
            return ""
        assert isinstance(self._storage, LocalStorage)
        try:
            for folder in sorted(self._known_links()):
                match = _FOLDER.fullmatch(Path(folder).name)
                assert match is not None
                if folder != newest.path and not _is_same_step(self._storage.root / match[1], Path(folder)):
                    _empty(Path(folder))
                    self._known_links().remove(folder)
        except OSError as error:
            return f"the space of removed steps is not free yet: {error}"
        return ""


def _is_same_step(step: Path, folder: Path) -> bool:
    """Return True if a folder has the links of a step, and not of one that was replaced since."""
    try:
        return (step / MANIFEST).samefile(folder / MANIFEST)
    except OSError:
        return False


def _link_files(source: Path, target: Path) -> bool:
    """Link every file of a folder into a new one; return False if the file system makes no hard links."""
    target.mkdir(mode=0o700)
    for path in sorted(source.rglob("*")):
        linked = target / path.relative_to(source)
        if path.is_dir():
            linked.mkdir(mode=0o700)
            continue
        try:
            os.link(path, linked, follow_symlinks=False)
        except FileNotFoundError:
            raise
        except OSError:
            return False
    return True


def _empty(folder: Path) -> None:
    """Delete the files of a folder and leave a note. Ray does not start a run again if the folder itself is gone."""
    (folder / _REMOVED).write_text(
        "Holdfast's `keep` removed this step. Ray demands that the folder stays. To keep a step longer, change "
        "`keep` of RayCheckpointer, or let Ray choose: CheckpointConfig(num_to_keep=...).\n"
    )
    (folder / MANIFEST).unlink()
    for path in sorted(folder.iterdir()):
        if path.name == _REMOVED:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
