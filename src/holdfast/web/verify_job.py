"""Verification of a checkpoint as a job: every byte against its digest, damage by file with the keys it affects."""

from __future__ import annotations

import time
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Unsupported
from holdfast.sources.foreign import missing_digests
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import PageJob
from holdfast.web.run_records import RunRecords

_KEYS = 200  # listed of one damage
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
        "damaged": [
            {
                "file": damage.file,
                "offset": damage.offset,
                "size": damage.size,
                "keys": list(damage.keys[:_KEYS]),
                "keys_count": len(damage.keys),
                "text": damage.problem,
            }
            for damage in report.damage[:_DAMAGE]
        ],
        "unchecked": "; ".join(report.unchecked) or None,
        "partial": False,
    }
