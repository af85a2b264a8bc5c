"""The runs under the roots of a page: roots of checkpoints, folders of training runs, single checkpoints; their ids."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from holdfast.core.errors import HoldfastError, InvalidArgument, NotFound, StorageError
from holdfast.core.names import folder_step, set_aside_step
from holdfast.sources import open_stored
from holdfast.storage import is_address, is_checkpoint, shared_storage_at
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.train.metrics import METRICS

Kind = Literal["root", "training", "checkpoint"]

CHECKPOINTS, CONFIG = "checkpoints", "config.toml"  # of a training run's folder
_HIDDEN = (".policy", ".tags", ".attempt-", ".mail-")  # folders that only a run's root has
_MOST_RUNS = 1000
_DEADLINE_S = 20


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One run that the page shows. `folder` is that of a training run, with its metrics and config."""

    id: str
    name: str
    address: str
    kind: Kind
    storage: SharedStorage
    folder: Path | None = None


class ServedRoots:
    """The roots that were given, opened. Nothing outside of them is ever read."""

    def __init__(self, roots: list[str]) -> None:
        self.given = roots
        self._found: dict[str, ServedRun] = {}
        self._listed: dict[Path | str, list[ServedRun]] = {}  # what each root had when it could be read
        self._tops = [_top(root) for root in roots]
        self._inside = [top.resolve() for top in self._tops if isinstance(top, Path)]

    def list(self) -> list[ServedRun]:
        """Return every run under the roots, in the order of the roots."""
        found = [run for top in self._tops for run in self._runs(top)]
        self._found = {run.id: run for run in found[:_MOST_RUNS]}
        return list(self._found.values())

    def _runs(self, top: Path | str) -> Sequence[ServedRun]:
        """Return the runs at a root; those that were there before if it cannot be read now, so that the others show.

        An object store is asked once: an address stays what it is, and each question may take seconds.
        """
        known = self._listed.get(top)
        if known is not None and isinstance(top, str):
            return known
        try:
            self._listed[top] = list(_runs_at(top))
        except (HoldfastError, OSError):
            if known is None:
                storage = shared_storage_at(top) if isinstance(top, str) else LocalStorage(top)
                return [_run("root", str(top), storage)]
        return self._listed[top]

    def get(self, run_id: str) -> ServedRun:
        """Return a run by its id; raises NotFound."""
        run = self._found.get(run_id)
        if run is None:
            run = next((run for run in self.list() if run.id == run_id), None)
        if run is None:
            raise NotFound(f"there is no run {run_id[:40]!r} under the roots of this page")
        return run

    def is_inside(self, storage: SharedStorage, folder: str) -> bool:
        """Return True unless a folder is a symlink that leads outside of the roots."""
        if not isinstance(storage, LocalStorage):
            return True
        path = storage.root / folder
        if not path.is_symlink():
            return True
        real = path.resolve()
        return any(real.is_relative_to(inside) for inside in self._inside)


def _top(root: str) -> Path | str:
    """Check one root; raises NotFound if it does not exist."""
    if is_address(root):
        storage = shared_storage_at(_with_deadline(root))
        if not storage.exists():
            raise NotFound(f"{root}: no such folder in the object store")
        return _with_deadline(root)
    if not root:
        raise InvalidArgument("the root is an empty string; give the path of a folder")
    path = Path(os.path.abspath(Path(root).expanduser()))
    if not path.exists():
        raise NotFound(f"{root}: no such file or folder; give the folder of a run, a root, or a folder of runs")
    if path.is_file():
        open_stored(path)  # raises for a file without tensors
    return path


def _with_deadline(address: str) -> str:
    """Add a short deadline to an address without one: people wait for the page."""
    if "deadline_s=" in address:
        return address
    return f"{address}{'&' if '?' in address else '?'}deadline_s={_DEADLINE_S}"


def _runs_at(top: Path | str) -> Iterator[ServedRun]:
    """Yield the run at a root, or the runs in the folder that it is."""
    if isinstance(top, str):
        storage = shared_storage_at(top)
        yield _run("checkpoint" if is_checkpoint(storage) else "root", storage.name, storage)
        return
    if top.is_file():
        yield _run("checkpoint", str(top), LocalStorage(top.parent))
        return
    run = _run_at(top)
    if run is not None:
        yield run
        return
    inner = list(_inner_runs(top))
    if inner:
        yield from inner
    elif _is_foreign(top):
        yield _run("checkpoint", str(top), LocalStorage(top))
    else:
        yield _run("root", str(top), LocalStorage(top))


def _inner_runs(folder: Path) -> Iterator[ServedRun]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in names:
        if name.startswith("."):
            continue
        try:
            run = _run_at(folder / name)
        except (HoldfastError, OSError):
            continue  # a folder of someone else is not a run to show
        if run is not None:
            yield run


def _run_at(path: Path) -> ServedRun | None:
    """Return the run at a local folder, None if it is not one itself."""
    try:
        names = set(os.listdir(path))
    except OSError as error:
        raise StorageError(f"listing {path}: {error.strerror}") from None
    storage = LocalStorage(path)
    if "holdfast.json" in names and is_checkpoint(storage):
        return _run("checkpoint", str(path), storage)
    if METRICS in names or (CHECKPOINTS in names and CONFIG in names):
        inner = path / CHECKPOINTS
        if not inner.is_symlink():
            return _run("training", str(path), LocalStorage(inner), path)
    if any(
        name.startswith(_HIDDEN) or folder_step(name) is not None or set_aside_step(name) is not None for name in names
    ):
        return _run("root", str(path), storage)
    return None


def _is_foreign(path: Path) -> bool:
    """Return True for a folder with weights of another tool."""
    from holdfast.sources import open_stored

    try:
        open_stored(path)
    except (HoldfastError, OSError):
        return False
    return True


def _run(kind: Kind, address: str, storage: SharedStorage, folder: Path | None = None) -> ServedRun:
    digest = hashlib.blake2b(address.encode(errors="surrogateescape"), digest_size=6).hexdigest()
    name = address.rstrip("/").rpartition("/")[2]
    return ServedRun(digest, name or address, address, kind, storage, folder)
