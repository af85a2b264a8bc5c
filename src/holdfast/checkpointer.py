"""A run's checkpoints: save steps under one root, restore the newest good one."""

from __future__ import annotations

import operator
import os
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Self

from holdfast.api import DEADLINE_S
from holdfast.core import limits
from holdfast.core.errors import Damaged, HoldfastError, InvalidArgument, NotFound, Unsupported
from holdfast.core.ranks import Ranks, together
from holdfast.format.names import MANIFEST, step_folder
from holdfast.loading import LoadOptions, LoadReport, load_checkpoint
from holdfast.persist.catalog import committed_steps
from holdfast.persist.checkpoint import Checkpoint, no_progress
from holdfast.saving import HoldfastWarning, SaveOptions, Saver
from holdfast.storage import Storage, storage_at
from holdfast.storage.local import LocalStorage


class SaveHandle:
    """One save: whether it is done, what it gave, and how long the training loop waited for it."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.stall_ms = 0.0
        self._checkpoint: Checkpoint | None = None
        self._error: HoldfastError | None = None

    def __repr__(self) -> str:
        outcome = "failed" if self._error else "saved" if self._checkpoint else "in flight"
        return f"SaveHandle(step={self.step}, {outcome}, stall_ms={self.stall_ms:.0f})"

    def done(self) -> bool:
        return self._checkpoint is not None or self._error is not None

    def result(self, timeout: float | None = None) -> Checkpoint:
        """The committed checkpoint; raises what made the save fail."""
        if self._error is not None:
            raise self._error
        if self._checkpoint is None:
            raise TimeoutError(f"step {self.step} was not saved within {timeout} s")
        return self._checkpoint


class Checkpointer:
    """Saves and restores the steps of one run. Every rank makes one with the same root.

    A failed save does not stop training: it warns, and the handle's `result()` raises.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        max_shard_size: int | str = "5GB",
        block_bytes: int = limits.BLOCK_BYTES,
        model_dtype: str | None = None,
        ties: Mapping[str, str] | None = None,
        replicas: str = "error",
        mesh: Any = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        options = SaveOptions(max_shard_size, block_bytes, model_dtype, ties or {}, replicas, mesh)
        self.storage = storage_at(root)
        if isinstance(self.storage, LocalStorage) and (self.storage.root / MANIFEST).exists():
            raise Unsupported(f"{self.storage.name} is a checkpoint; a Checkpointer takes the folder above it")
        self._options = options
        self._deadline_s = deadline_s
        self._saver = Saver(self.storage, options)
        self._parent: int | None = None
        self._closed = False
        self.last_report: LoadReport | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is in flight; a blocking save leaves nothing. A closed Checkpointer saves no more."""
        self._closed = True

    def save(self, step: int, state: MutableMapping[str, Any]) -> SaveHandle:
        """Save the state as `step`. Saving a committed step again replaces it, unless it is the same."""
        started = time.perf_counter()
        ranks = self._ranks()
        step = together(ranks, lambda: self._checked(step))[ranks.rank]
        handle = SaveHandle(step)
        try:
            handle._checkpoint = self._saver.save(ranks, step_folder(step), state, step=step, parent=self._parent)
            self._parent = step
        except HoldfastError as error:
            handle._error = error
            warnings.warn(f"step {step} was not saved: {error}", HoldfastWarning, stacklevel=2)
        handle.stall_ms = (time.perf_counter() - started) * 1000
        return handle

    def _checked(self, step: Any) -> int:
        if self._closed:
            raise Unsupported(f"the Checkpointer of {self.storage.name} is closed")
        if isinstance(step, bool) or not hasattr(step, "__index__") or operator.index(step) < 0:
            raise InvalidArgument(f"step={step!r} is not a whole number from 0 on")
        return operator.index(step)

    def restore(
        self,
        state: MutableMapping[str, Any],
        *,
        step: int | None = None,
        strict: bool = True,
        verify: bool = True,
        cast: bool = False,
        only: Sequence[str] = (),
        ignore: Sequence[str] = (),
        progress: Callable[[int], None] = no_progress,
    ) -> int | None:
        """Load the newest good checkpoint, or the one of `step`; returns its step, None if there is none.

        A damaged checkpoint is skipped with a warning, on every rank even if only one sees the
        damage. When all are damaged, raises Damaged. `last_report` tells what was loaded.
        """
        ranks = self._ranks()
        options = LoadOptions(strict, verify, cast, only, ignore, self._options.ties, self._options.mesh)
        skipped: list[str] = []
        for candidate in self._candidates(ranks, step, skipped):
            try:
                report = load_checkpoint(
                    ranks, self._opener(candidate), state, options, progress, deadline_s=self._deadline_s
                )
            except Damaged as error:
                if step is not None:
                    raise
                skipped.append(f"step {candidate}: {error}")
                continue
            self.last_report = report
            self._parent = candidate
            if skipped and ranks.rank == 0:
                warnings.warn("skipped damaged checkpoints:\n  " + "\n  ".join(skipped), HoldfastWarning, stacklevel=2)
            return candidate
        if step is not None:
            raise NotFound(f"{self.storage.name} has no checkpoint of step {step}")
        if skipped:
            raise Damaged(
                f"{self.storage.name}: no checkpoint is good, and the live state may hold parts of them:\n  "
                + "\n  ".join(skipped)
            )
        return None

    def _opener(self, step: int) -> Callable[[], Checkpoint]:
        return lambda: Checkpoint(self.storage, step_folder(step))

    def _candidates(self, ranks: Ranks, step: int | None, skipped: list[str]) -> list[int]:
        """Steps to try, newest first, as rank 0 sees them: one decision for all ranks."""

        def look() -> list[Any] | None:
            if ranks.rank:
                return None
            good, bad = [], []
            for entry in reversed(committed_steps(self.storage)):
                if step not in (None, entry.step):
                    continue
                if entry.manifest is not None:
                    good.append(entry.step)
                elif entry.problem is not None and (step is not None or not entry.damaged):
                    raise entry.problem
                else:
                    bad.append(f"step {entry.step}: {entry.problem}")
            return [good, bad]

        answer = together(ranks, look)[0]
        assert answer is not None
        skipped += answer[1]
        return list(answer[0])

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return [entry.step for entry in committed_steps(self.storage) if entry.manifest is not None]

    def _ranks(self) -> Ranks:
        from holdfast.adapters.comm import current_ranks

        return current_ranks(self._deadline_s)
