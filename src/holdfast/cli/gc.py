"""`holdfast gc`: delete unkept checkpoints, set-aside steps, leftovers of dead saves and states left in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import committed_steps, is_left, set_aside_folders
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.tags import tagged
from holdfast.cli.render import clean, open_run, print_json, print_table, size_text
from holdfast.core.errors import Damaged
from holdfast.core.names import set_aside_kind
from holdfast.keep import Policy, parse
from holdfast.storage.base import SharedStorage, Storage
from holdfast.writer.arena_card import kept_states
from holdfast.writer.startup_cleanup import clean_arenas, clean_storage, dead_attempts

_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Item:
    """One item under the root: whether it is deleted, and the reason."""

    name: str
    deleted: bool
    why: str
    size: int | None = None
    is_aside: bool = False  # not on the living branch


@click.command("gc", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.option("--keep", "keep_text", metavar="POLICY", help="The policy to apply instead of the run's own.")
@click.option("--abandoned", is_flag=True, help="Also delete steps set aside by rewinds: abandoned-step-N.")
@click.option("--damaged", is_flag=True, help="Also delete steps set aside as damaged: damaged-step-N.")
@click.option("--memory", is_flag=True, help="Also delete states that failed saves left in this host's memory.")
@click.option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    root: str, keep_text: str | None, abandoned: bool, damaged: bool, memory: bool, dry_run: bool, as_json: bool
) -> None:
    """Delete checkpoints under ROOT that no policy keeps, and leftovers of dead saves.

    \b
    holdfast gc runs/llama --dry-run
    holdfast gc runs/llama --keep "last(3) | every(1000) | best(2, loss, min) | newer_than(36h)"

    Without --keep, the policy of the last run under ROOT applies. If that run had none, no
    checkpoint is deleted. The newest step, the newest undamaged step (verified by reading it),
    tagged steps and steps being read are always kept. A run may continue in the meantime.
    """
    storage = open_run(root)
    policy, problems = _policy(storage, keep_text)
    aside = {kind for kind, asked in (("abandoned", abandoned), ("damaged", damaged)) if asked}
    dead = dead_attempts(storage, _SILENCE_S)
    try:
        items = [*_steps(storage, policy), *_set_aside(storage, aside)]
    except Damaged as error:  # an unreadable tag may protect any of them
        policy, items = None, []
        problems.append(f"no checkpoint is deleted: {error}")
    items += [_Item("", False, problem) for problem in problems]
    items += [_Item(name, True, "left by a dead save") for name in sorted(dead)]
    run = run_id(storage)
    in_memory = _in_memory(run, deleted=memory)
    if not dry_run:
        items = _collect(storage, policy, dead, items)
        if memory:
            clean_arenas(run)
    items += in_memory
    if as_json:
        print_json(_fields(policy, dry_run, items))
    else:
        _print(policy, dry_run, items)


def _policy(storage: Storage, keep_text: str | None) -> tuple[Policy | None, list[str]]:
    """Return the policy to apply, and the problem if it cannot be read."""
    try:
        return retention.saved_policy(storage) if keep_text is None else parse(keep_text), []
    except Damaged as error:
        return None, [f"no checkpoint is deleted: {error}"]


def _steps(storage: Storage, policy: Policy | None) -> list[_Item]:
    if policy is None:
        return []
    return [
        _Item(
            decision.entry.folder,
            not decision.stays,
            ", ".join(decision.reasons) or "not kept by the policy",
            decision.entry.manifest.total_bytes if decision.entry.manifest else None,
        )
        for decision in retention.decide(storage, policy)
    ]


def _set_aside(storage: Storage, kinds: set[str]) -> list[_Item]:
    """Return steps that were set aside, and damaged steps that a restore skipped."""
    steps, aside = committed_steps(storage), set_aside_folders(storage)
    tags = tagged(storage, [*steps, *aside])
    skipped = {left for entry in steps if entry.manifest for left in entry.manifest.skips}
    items = []
    for entry in (*aside, *(entry for entry in steps if is_left(entry, skipped))):
        kind = set_aside_kind(entry.folder) or "damaged"
        why = f"--{kind} was given" if kind in kinds else f"{kind}; --{kind} deletes it"
        why = f"tag {tags[entry.folder][0]}" if entry.folder in tags else why
        size = entry.manifest.total_bytes if entry.manifest else None
        items.append(_Item(entry.folder, kind in kinds and entry.folder not in tags, why, size, is_aside=True))
    return items


def _in_memory(run: str, *, deleted: bool) -> list[_Item]:
    """Return the states that failed saves left in this host's memory."""
    why = (
        "--memory was given" if deleted else "captured but not written: the next start restores it; --memory deletes it"
    )
    states = kept_states(run)
    return [_Item(" ".join(kept.paths), deleted, f"step {kept.step}, {why}", kept.size) for kept in states]


def _collect(storage: SharedStorage, policy: Policy | None, dead: set[str], items: list[_Item]) -> list[_Item]:
    """Delete the items. Returns them with the reason of each that could not be deleted."""
    clean_storage(storage, dead)
    outcome = retention.apply(storage, policy)
    for item in items:
        if item.deleted and item.is_aside:
            storage.remove(item.name)
    left = set(storage.folders())
    storage.sweep()
    done = [
        replace(item, deleted=False, why="it is being read") if item.name in left else item
        for item in items
        if item.deleted
    ]
    problems = [_Item("", False, text) for text in outcome.problems]
    return [*(item for item in items if not item.deleted), *done, *problems]


def _fields(policy: Policy | None, dry_run: bool, items: list[_Item]) -> dict[str, Any]:
    return {
        "policy": None if policy is None else str(policy),
        "dry_run": dry_run,
        "gone": [_item_fields(item) for item in items if item.deleted],
        "kept": [_item_fields(item) for item in items if not item.deleted],
    }


def _item_fields(item: _Item) -> dict[str, Any]:
    return {"name": item.name, "bytes": item.size, "why": item.why}


def _size(item: _Item) -> str:
    return "" if item.size is None else size_text(item.size)


def _print(policy: Policy | None, dry_run: bool, items: list[_Item]) -> None:
    click.echo(f"policy: {clean(policy) if policy else 'none: no checkpoint is deleted; see --keep'}")
    verb = "would be deleted" if dry_run else "deleted"
    rows = [[item.name, _size(item), verb if item.deleted else "kept", item.why] for item in items]
    if rows:
        print_table(["name", "size", "", "reason"], rows, right=(1,))
    deleted = [item for item in items if item.deleted]
    freed = sum(item.size or 0 for item in deleted)
    click.echo(f"{len(deleted)} {verb}" + (f", {size_text(freed)}" if freed else ""))
