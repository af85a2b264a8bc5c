"""The judge of a root after a power loss: nothing committed is corrupt, nothing promised is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import HoldfastError, NotFound
from holdfast.persist.catalog import committed_steps
from holdfast.persist.checkpoint import Checkpoint
from holdfast.storage.local import LocalStorage


@dataclass(frozen=True, slots=True)
class Promise:
    """From now on the step must be there and good, written by one of these attempts; by none: it may go."""

    step: int
    attempts: tuple[str, ...]


def judge_steps(root: Path, promises: Sequence[Promise]) -> str:
    """What is wrong with the steps under a root: "corrupt ...", "missing ...", or nothing."""
    storage = LocalStorage(root)
    good: dict[int, str] = {}
    for entry in committed_steps(storage):
        if isinstance(entry.problem, NotFound):
            continue  # without a manifest it is not committed
        try:
            checkpoint = Checkpoint(storage, entry.folder)
            report = checkpoint.verify()
        except HoldfastError as error:
            return f"corrupt: {error}"
        if not report.good:
            return f"corrupt: {entry.folder}: {report.damage[0].file}: {report.damage[0].problem}"
        good[entry.step] = checkpoint.manifest.attempt
    for step, attempts in {promise.step: promise.attempts for promise in promises}.items():
        if attempts and good.get(step) not in attempts:
            return f"missing: step {step} of {' or '.join(attempts)}, found {good.get(step)}"
    return ""
