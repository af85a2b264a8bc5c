"""The only requests that change something, with `--allow-changes`: tags, and what retention would delete."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from holdfast.checkpoint import retention
from holdfast.checkpoint.tags import add_tag, remove_tag
from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.web.page_jobs import PageJob
from holdfast.web.run_records import RunRecords


def tag_step(records: RunRecords, folder: str, name: str) -> dict[str, Any]:
    """Tag a step, moving a tag that exists."""
    add_tag(records.run.storage, name, records.entry(folder))
    records.refresh(force=True)
    return {"tagged": name, "folder": folder}


def untag_step(records: RunRecords, folder: str, name: str) -> dict[str, Any]:
    """Delete a tag of a step; raises InvalidArgument if it is on another one."""
    row = records.rows.get(folder)
    if row is None or name not in row.tags:
        raise InvalidArgument(f"{folder[:80]} has no tag {name[:80]!r}")
    remove_tag(records.run.storage, name)
    records.refresh(force=True)
    return {"deleted": name, "folder": folder}


def collect_garbage(job: PageJob, records: RunRecords, folders: Collection[str]) -> dict[str, Any]:
    """Delete the steps that no policy keeps, if they are still exactly those that the preview showed.

    As `holdfast gc` does, this reads the newest step to be sure that an undamaged one stays.
    """
    job.text = "checking which steps no policy keeps"
    storage = records.run.storage
    policy = retention.saved_policy(storage)
    if policy is None:
        raise InvalidArgument(f"{records.run.name} has no policy: nothing is deleted")
    gone = {decision.entry.folder for decision in retention.decide(storage, policy) if not decision.stays}
    if gone != set(folders):
        raise Mismatch(
            f"the steps to delete have changed since they were shown, to {', '.join(sorted(gone)) or 'none'}; "
            "look again"
        )
    job.advance()
    job.text = "deleting"
    outcome = retention.apply(storage, policy)
    storage.sweep()
    records.refresh(force=True)
    return {"removed": outcome.removed, "busy": outcome.busy, "set_aside": outcome.aside, "problems": outcome.problems}
