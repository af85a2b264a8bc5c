"""Verification of a checkpoint as a job: every byte against its digest, damage by file with the keys it affects."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.verify import Damage
from holdfast.core.errors import Unsupported
from holdfast.sources.foreign import missing_digests
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import PageJob
from holdfast.web.run_records import RunRecords

_KEYS = 200  # listed of one damage
_ALL_KEYS = 5000  # listed of all damage
_DAMAGE = 500


def verify_step(job: PageJob, records: RunRecords, opened: OpenStep) -> dict[str, Any]:
    """Verify a checkpoint, and remember the outcome; raises Unsupported for one without digests."""
    checkpoint = opened.checkpoint
    if not checkpoint.manifest.writer:
        raise Unsupported(missing_digests(checkpoint))
    job.total = checkpoint.manifest.total_bytes
    job.text = "reading every byte"
    began = time.monotonic()
    fresh = Checkpoint(checkpoint.storage, checkpoint.folder)  # forgotten afterwards, with all that was read
    report = fresh.verify(job.advance)
    records.note_verified(checkpoint.folder, fresh.manifest.attempt, is_good=report.good)
    return {
        "ok": report.good,
        "bytes": report.bytes,
        "files": report.files,
        "seconds": round(time.monotonic() - began, 3),
        "damaged": _damaged(report.damage),
        "damaged_count": len(report.damage),
        "damaged_files": len({damage.file for damage in report.damage}),
        "damaged_tensors": _count_tensors(report.damage),
        "unchecked": "; ".join(report.unchecked) or None,
        "partial": False,
    }


def _damaged(damage: Sequence[Damage]) -> list[dict[str, Any]]:
    """Return the first damage, with a bounded number of keys: results are kept in memory, and sent as a whole."""
    left = _ALL_KEYS
    found = []
    for one in damage[:_DAMAGE]:
        keys = list(one.keys[: min(_KEYS, left)])
        left -= len(keys)
        found.append(
            {
                "file": one.file,
                "offset": one.offset,
                "size": one.size,
                "keys": keys,
                "keys_count": len(one.keys),
                "text": one.problem,
            }
        )
    return found


def _count_tensors(damage: Sequence[Damage]) -> int:
    """Return how many tensors are affected: one in several bad blocks of a file counts once."""
    by_file: dict[str, set[str]] = {}
    for one in damage:
        by_file.setdefault(one.file, set()).update(one.keys)
    return sum(map(len, by_file.values()))
