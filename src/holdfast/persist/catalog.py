"""The checkpoints under a root: which steps are committed, read from their manifests alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, NotFound, Untrusted
from holdfast.format.manifest import Manifest, decode_manifest
from holdfast.format.names import MANIFEST, folder_step, set_aside_step
from holdfast.persist.lineage import Left
from holdfast.storage import requirement
from holdfast.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Committed:
    """One folder that bears a step's name: its manifest, or why that cannot be read."""

    step: int
    folder: str
    manifest: Manifest | None
    problem: HoldfastError | None = None

    @property
    def damaged(self) -> bool:
        """Whether it may be passed over: what cannot be read just now, or is of a newer format, may not."""
        return isinstance(self.problem, Damaged | NotFound)

    @property
    def trouble(self) -> str:
        """Why the step cannot be used, in a word for tables; "" if it can."""
        if self.problem is None:
            return ""
        return "NOT TRUSTED" if isinstance(self.problem, Untrusted) else "DAMAGED"


def committed_steps(storage: Storage) -> list[Committed]:
    """Every step under the root, oldest first; a folder without a good manifest says why."""
    out = []
    require = requirement(storage)
    for folder in storage.folders():
        step = folder_step(folder)
        if step is not None:
            found = _look(storage, step, folder, require)
            if not isinstance(found.problem, NotFound) or folder in storage.folders():  # else it went meanwhile
                out.append(found)
    return sorted(out, key=lambda found: found.step)


def set_aside(storage: Storage) -> list[Committed]:
    """The folders that were set aside, as abandoned or as damaged, with their manifests."""
    require = requirement(storage)
    return [
        _look(storage, step, folder, require)
        for folder in storage.folders()
        if (step := set_aside_step(folder)) is not None
    ]


def living_steps(storage: Storage) -> list[Committed]:
    """The steps of the living branch, oldest first: without those that a restore left behind.

    The first commit after a rewind names what it gave up, and sets it aside under another
    name; where that was cut short, its word still keeps them from coming back.
    """
    found = committed_steps(storage)
    left = steps_left(found)
    return [entry for entry in found if not is_left(entry, left)]


def newest_readable(storage: Storage, tell: Callable[[str], None]) -> Committed | None:
    """The newest step of the living branch whose manifest can be read; `tell` hears of the newer ones, passed over."""
    for entry in reversed(living_steps(storage)):
        if entry.manifest is not None:
            return entry
        tell(f"step {entry.step} is passed over: {entry.problem}")
    return None


def steps_left(found: Iterable[Committed]) -> set[Left]:
    """The steps, with their attempts, that some manifest says were left."""
    return {left for entry in found if entry.manifest for left in (*entry.manifest.abandons, *entry.manifest.skips)}


def is_left(entry: Committed, left: Collection[Left]) -> bool:
    return entry.manifest is not None and (entry.step, entry.manifest.attempt) in left


def _look(storage: Storage, step: int, folder: str, require: Callable[[str], None]) -> Committed:
    try:
        require(folder)  # before anything of it counts: a manifest also says which steps to give up
        data = storage.read(folder, MANIFEST, limits.JSON_BYTES)
        manifest = decode_manifest(data, f"{storage.name}/{folder}")
    except HoldfastError as error:
        return Committed(step, folder, None, error)
    if manifest.step != step:
        odd = Damaged(f"{storage.name}/{folder}: its manifest is of step {manifest.step}")
        return Committed(step, folder, None, odd)
    return Committed(step, folder, manifest)
