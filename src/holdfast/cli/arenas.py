"""`holdfast arenas`: list what runs hold in the memory of this host, and free what crashed runs left."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.run_identity import run_id
from holdfast.cli.render import clean, count, open_run, print_json, print_table, size_text
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.writer.arena_inventory import StateInMemory, free_state, states_in_memory

_SHOWN = 12  # characters of a run's key
_COMMAND = 60  # characters of a command line


@click.command("arenas", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("root", required=False)
@click.option(
    "--free", metavar="RUN|all", help="Free what no living process holds: of a run, or of all that are listed."
)
@click.option("--yes", is_flag=True, help="Free also states that were not written, without asking.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(root: str | None, free: str | None, yes: bool, as_json: bool) -> None:
    """List what runs hold in the memory of this host: all of this user's runs, or the one under ROOT.

    \b
    holdfast arenas                     all runs
    holdfast arenas runs/llama          the run under this root; its steps tell what was written
    holdfast arenas --free 3f2a         a run, by the beginning of its name in the list
    holdfast arenas --free all --yes    all that no living process holds

    A background save captures the state into an arena in /dev/shm. A crashed run may leave one.
    If a whole state is in it that was not written, the next start under its root restores it:
    --free asks before it frees such a state. What a living process holds is never freed.

    Exit code 0: success. 1: something of the RUN to free is held by a process. 2: usage error.
    """
    storage = None if root is None else open_run(root)
    states = states_in_memory("" if storage is None else run_id(storage))
    committed = () if storage is None else committed_steps(storage)
    written = {entry.manifest.identity for entry in committed if entry.manifest is not None}
    if free is None:
        _list(states, written, as_json)
        return
    chosen = [state for state in states if free == "all" or state.run.startswith(free)]
    if free != "all":
        _require_one_run(chosen, free)
    left = [state for state in chosen if not state.is_held]
    unwritten = [state for state in left if state.is_unwritten(written)]
    spared = unwritten if unwritten and not yes and not _is_wanted(unwritten) else []
    freed = [state for state in left if state not in spared and free_state(state)]
    kept = [state for state in chosen if state not in freed]
    if as_json:
        parts = {"freed": freed, "kept": kept}
        print_json({name: [_fields(state, written) for state in part] for name, part in parts.items()})
    else:
        click.echo(f"freed {size_text(sum(state.size for state in freed))} of {count(len(freed), 'state')}")
        for state in kept:
            elsewhere = "a process of this host or of another container took it meanwhile"
            why = "not written" if state in spared else _holder(state) or elsewhere
            click.echo(f"kept {_name(state)}: {why}")
    raise click.exceptions.Exit(1 if free != "all" and any(state.is_held for state in kept) else 0)


def _require_one_run(chosen: list[StateInMemory], free: str) -> None:
    runs = sorted({state.run for state in chosen})
    if not runs or not free:
        raise NotFound(f"no run in the memory of this host begins with {free!r}; `holdfast arenas` lists them")
    if len(runs) > 1:
        raise InvalidArgument(f"{free!r} begins several runs: {', '.join(runs)}; give more characters")


def _is_wanted(unwritten: list[StateInMemory]) -> bool:
    """Ask whether states that were not written may be freed."""
    names = ", ".join(map(_name, unwritten))
    if not sys.stdin.isatty():
        raise InvalidArgument(
            f"{names}: captured and not written, so the next start under the root would restore it; --yes frees it"
        )
    return click.confirm(f"{names}: captured and not written; the next start would restore it. Free it?", err=True)


def _list(states: list[StateInMemory], written: set[str], as_json: bool) -> None:
    if as_json:
        print_json([_fields(state, written) for state in states])
        return
    if not states:
        click.echo("no arenas in the memory of this host")
        return
    rows = [
        [
            state.run[:_SHOWN],
            "" if state.step is None else str(state.step),
            ",".join(map(str, state.ranks)),
            size_text(state.size),
            _content(state, written),
            _holder(state) or "no",
        ]
        for state in states
    ]
    print_table(["run", "step", "ranks", "size", "state", "held"], rows, right=(1, 3))
    left = sum(state.size for state in states if not state.is_held)
    if left:
        click.echo(f"{size_text(left)} held by no process: --free all frees it")


def _content(state: StateInMemory, written: set[str]) -> str:
    if state.step is None:
        return "nothing waits to be written"
    return "not written" if state.is_unwritten(written) else "written"


def _holder(state: StateInMemory) -> str:
    if not state.is_held:
        return ""
    if not state.holders:
        return "held by a process of another container"
    commands = list(filter(None, map(_command_of, state.holders)))
    program = f": {commands[0]}" if commands else ""
    return f"held by process {', '.join(map(str, state.holders))}{program}"


def _command_of(pid: int) -> str:
    """Return the command line of a training process, shortened; "" for a writer, and for a process that is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if "-c" in words:
        return ""
    text = clean(" ".join(words).strip())
    return text if len(text) <= _COMMAND else f"...{text[-_COMMAND:]}"


def _name(state: StateInMemory) -> str:
    step = "no whole state" if state.step is None else f"step {state.step}"
    return clean(f"{step} of run {state.run[:_SHOWN]} ({size_text(state.size)})")


def _fields(state: StateInMemory, written: set[str]) -> dict[str, Any]:
    return asdict(state) | {"unwritten": state.is_unwritten(written)}
