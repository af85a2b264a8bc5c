"""`holdfast gc`: take away what no policy keeps, and what dead saves left behind."""

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
from holdfast.format.names import set_aside_kind
from holdfast.keep import Policy, parse
from holdfast.storage.base import SharedStorage, Storage
from holdfast.writer import startup_cleanup

_SILENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class _Line:
    """One thing under the root: whether it goes, and why or why not."""

    name: str
    goes: bool
    why: str
    size: int | None = None
    is_aside: bool = False  # not of the living branch


@click.command("gc", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root")
@click.option("--keep", "keep_text", metavar="POLICY", help="What to keep, instead of the run's own policy.")
@click.option("--abandoned", is_flag=True, help="Also what rewinds set aside: abandoned-step-N.")
@click.option("--damaged", is_flag=True, help="Also what was set aside as damaged: damaged-step-N.")
@click.option("--memory", is_flag=True, help="Also states that failed saves left in the memory of this host.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    root: str, keep_text: str | None, abandoned: bool, damaged: bool, memory: bool, dry_run: bool, as_json: bool
) -> None:
    """Take away what is not kept under ROOT, and what dead saves left behind.

    \b
    holdfast gc runs/llama --dry-run
    holdfast gc runs/llama --keep "last(3) | every(1000) | best(2, loss, min) | newer_than(36h)"

    Without --keep it goes by the policy of the run that saved there last; if that had none, no
    checkpoint goes. The newest step, the newest whose every byte is good (it is read to know),
    tagged steps and steps that somebody reads always stay. A run may go on meanwhile.
    """
    storage = open_run(root)
    policy, problems = _policy(storage, keep_text)
    aside = {kind for kind, asked in (("abandoned", abandoned), ("damaged", damaged)) if asked}
    dead = startup_cleanup.dead_attempts(storage, _SILENCE_S)
    try:
        lines = [*_steps(storage, policy), *_set_aside(storage, aside)]
    except Damaged as error:  # a tag that cannot be read may protect any of them
        policy, lines = None, []
        problems.append(f"no checkpoint goes: {error}")
    lines += [_Line("", False, problem) for problem in problems]
    lines += [_Line(name, True, "left by a dead save") for name in sorted(dead)]
    run = run_id(storage)
    kept = _in_memory(run, goes=memory)
    if not dry_run:
        lines = _collect(storage, policy, dead, lines)
        if memory:
            startup_cleanup.clean_arenas(run)
    lines += kept
    if as_json:
        print_json(_fields(policy, dry_run, lines))
    else:
        _print(policy, dry_run, lines)


def _policy(storage: Storage, given: str | None) -> tuple[Policy | None, list[str]]:
    """Return the policy to go by, and what is to be said of one that cannot be read."""
    try:
        return retention.saved_policy(storage) if given is None else parse(given), []
    except Damaged as error:
        return None, [f"no checkpoint goes: {error}"]


def _steps(storage: Storage, policy: Policy | None) -> list[_Line]:
    if policy is None:
        return []
    return [
        _Line(
            decision.entry.folder,
            not decision.stays,
            ", ".join(decision.reasons) or "nothing keeps it",
            decision.entry.manifest.total_bytes if decision.entry.manifest else None,
        )
        for decision in retention.decide(storage, policy)
    ]


def _set_aside(storage: Storage, wanted: set[str]) -> list[_Line]:
    """What was set aside, and damaged steps that a restore passed over and left where they were."""
    found, aside = committed_steps(storage), set_aside_folders(storage)
    tags = tagged(storage, [*found, *aside])
    skipped = {left for entry in found if entry.manifest for left in entry.manifest.skips}
    lines = []
    for entry in (*aside, *(entry for entry in found if is_left(entry, skipped))):
        kind = set_aside_kind(entry.folder) or "damaged"
        why = "it was asked for" if kind in wanted else f"{kind}; --{kind} takes it away"
        why = f"tag {tags[entry.folder][0]}" if entry.folder in tags else why
        size = entry.manifest.total_bytes if entry.manifest else None
        lines.append(_Line(entry.folder, kind in wanted and entry.folder not in tags, why, size, is_aside=True))
    return lines


def _in_memory(run: str, *, goes: bool) -> list[_Line]:
    """Return what failed saves left in the memory of this host."""
    why = "it was asked for" if goes else "captured, not written: the next start restores it; --memory gives it up"
    states = startup_cleanup.kept_states(run)
    return [_Line(" ".join(kept.paths), goes, f"step {kept.step}, {why}", kept.size) for kept in states]


def _collect(storage: SharedStorage, policy: Policy | None, dead: set[str], lines: list[_Line]) -> list[_Line]:
    """Do it; what could not go says so."""
    startup_cleanup.clean_storage(storage, dead)
    outcome = retention.apply(storage, policy)
    for line in lines:
        if line.goes and line.is_aside:
            storage.remove(line.name)
    left = set(storage.folders())
    storage.sweep()
    done = [
        replace(line, goes=False, why="somebody reads it") if line.name in left else line for line in lines if line.goes
    ]
    return [*(line for line in lines if not line.goes), *done, *(_Line("", False, text) for text in outcome.problems)]


def _fields(policy: Policy | None, dry_run: bool, lines: list[_Line]) -> dict[str, Any]:
    return {
        "policy": None if policy is None else str(policy),
        "dry_run": dry_run,
        "gone": [_line_fields(line) for line in lines if line.goes],
        "kept": [_line_fields(line) for line in lines if not line.goes],
    }


def _line_fields(line: _Line) -> dict[str, Any]:
    return {"name": line.name, "bytes": line.size, "why": line.why}


def _size(line: _Line) -> str:
    return "" if line.size is None else size_text(line.size)


def _print(policy: Policy | None, dry_run: bool, lines: list[_Line]) -> None:
    click.echo(f"policy: {clean(policy) if policy else 'none: no checkpoint goes; see --keep'}")
    word = "would go" if dry_run else "gone"
    rows = [[line.name, _size(line), word if line.goes else "stays", line.why] for line in lines]
    if rows:
        print_table(["what", "size", "", "why"], rows, right=(1,))
    gone = [line for line in lines if line.goes]
    freed = sum(line.size or 0 for line in gone)
    click.echo(f"{len(gone)} {word}" + (f", {size_text(freed)}" if freed else ""))
