"""The start of a run: identify the root, clean up, start the background saver; report steps of an older run."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from holdfast.checkpoint.catalog import living_steps
from holdfast.checkpoint.run_identity import identify
from holdfast.core.clock import process_age_s
from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.core.events import Event, Listener
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import PendingWarnings
from holdfast.engine.background_save import BackgroundSaver
from holdfast.engine.flight import RunSession
from holdfast.engine.options import BackgroundOptions, SaveOptions
from holdfast.engine.recovery import Cleaned, Leftovers
from holdfast.storage import is_checkpoint
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage

# How old the process was when this module was imported, until a restore reports it.
_IMPORTED_S = [age for age in (process_age_s(),) if age is not None]


@dataclass(frozen=True, slots=True)
class StartedRun:
    """The values that a start gives to a Checkpointer."""

    saver: BackgroundSaver
    leftovers: Leftovers


def start_run(
    ranks: Ranks,
    storage: SharedStorage,
    options: SaveOptions,
    background: BackgroundOptions,
    listener: Listener,
    warnings: PendingWarnings,
    *,
    create_root: bool = True,
) -> StartedRun | None:
    """Wait for writers of earlier starts, clean up after them, start this one. Collective.

    The root gets its identity, and is created if it does not exist. Without `create_root`, return
    None for a root that does not exist.
    """
    if not create_root and not run_on_all_ranks(ranks, lambda: ranks.rank > 0 or storage.exists())[0]:
        return None
    token = run_on_all_ranks(ranks, lambda: _new_token(ranks, storage))[0]
    run = identify(ranks, storage)
    if not run.persistent and ranks.rank == 0:
        detail = (
            f"{storage.name} has no .holdfast-root that can be read or created: a state that cannot be written is not "
            "kept in memory for the next start"
        )
        listener(Event("no identity", detail=detail))
    leftovers = Leftovers(storage, run.key, background)
    cleaned = leftovers.clean(ranks)
    if ranks.rank == 0:
        _report_cleaned(storage, cleaned, listener, warnings)
    session = RunSession(storage, run, token, listener, warnings)
    return StartedRun(_start_saver(ranks, session, options, background), leftovers)


def _new_token(ranks: Ranks, storage: SharedStorage) -> str:
    if ranks.rank == 0 and not isinstance(storage, LocalStorage):
        refuse_checkpoint(storage)  # here, where every rank learns of a storage that does not answer
    return secrets.token_hex(8)


def refuse_checkpoint(storage: SharedStorage) -> None:
    """Raise Unsupported if the root of a run is a checkpoint itself."""
    if is_checkpoint(storage):
        raise Unsupported(f"{storage.name} is a checkpoint; a Checkpointer takes the folder above it")


def _report_cleaned(storage: SharedStorage, cleaned: Cleaned, listener: Listener, warnings: PendingWarnings) -> None:
    if cleaned.attempts or cleaned.waited_s > 1:
        abandoned = f"{cleaned.attempts} attempts that nobody held"
        detail = abandoned if cleaned.attempts else "waited for writers of an earlier start"
        listener(Event("cleaned", seconds=cleaned.waited_s, detail=detail))
    if cleaned.strangers:
        warnings.add(
            f"another run is at work under {storage.name} ({', '.join(cleaned.strangers)}): "
            "if both save, they replace each other's steps"
        )
    for path in cleaned.older:
        warnings.add(
            f"{path} was captured by an older version of Holdfast for a root at {storage.name}. It does not "
            f"say which root that was, so it is not restored; free the memory with `rm {path} {path}.card`"
        )


def _start_saver(
    ranks: Ranks, session: RunSession, options: SaveOptions, background: BackgroundOptions
) -> BackgroundSaver:
    started: list[BackgroundSaver] = []
    try:
        run_on_all_ranks(ranks, lambda: started.append(BackgroundSaver(ranks, session, options, background)))
    except HoldfastError:
        for saver in started:
            saver.close(0.0)
        raise
    return started[0]


def report_older_run(ranks: Ranks, storage: SharedStorage, step: int, listener: Listener) -> None:
    """After the first save of a run that restored nothing: report higher steps, which a restart would restore."""
    if ranks.rank:
        return
    with contextlib.suppress(HoldfastError):  # the save reports a storage that fails
        higher = [entry.step for entry in living_steps(storage) if entry.manifest and entry.step > step]
        if higher:
            detail = (
                f"{storage.name} has step {higher[-1]} of a run that was not restored: a restart takes that, "
                "and retention counts it among the newest; call restore(state) first, or choose an empty root"
            )
            listener(Event("unrestored", step, detail=detail))


def report_import(listener: Listener, rank: int) -> None:
    """Report the import at the first restore of the process: a restart begins with it."""
    if _IMPORTED_S:
        listener(Event("imported", rank=rank, seconds=_IMPORTED_S.pop(), detail="since the process began"))
