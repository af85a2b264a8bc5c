"""The iterations of a Megatron run for `holdfast ls`: their folders, sizes, and which one is read by default."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from holdfast.cli.render import print_table, size_text
from holdfast.core.errors import HoldfastError
from holdfast.core.names import iteration_step
from holdfast.sources.megatron_run import tracked_folder
from holdfast.storage.base import SharedStorage

_NEWEST = "the newest, by latest_checkpointed_iteration.txt"


def iterations_of(storage: SharedStorage) -> list[dict[str, Any]]:
    """Return the iterations of a Megatron run, oldest first; none for another folder. Only names and sizes are read."""
    steps = {folder: step for folder in storage.folders() if (step := iteration_step(folder)) is not None}
    try:
        newest = tracked_folder(storage)
    except HoldfastError as error:
        newest = None
        click.echo(f"holdfast: {error}", err=True)
    names = sorted(steps, key=steps.__getitem__)
    if newest is not None and newest not in steps:
        names.append(newest)  # "release", or one that is missing
    return [_fields(storage, name, steps.get(name), newest) for name in names]


def _fields(storage: SharedStorage, name: str, step: int | None, newest: str | None) -> dict[str, Any]:
    try:
        size = sum(storage.files(name).values())
    except HoldfastError:
        return {"step": step, "folder": name, "bytes": 0, "notes": [f"{_NEWEST}, and missing"]}
    return {"step": step, "folder": name, "bytes": size, "notes": [_NEWEST] if name == newest else []}


def print_iterations(iterations: Sequence[dict[str, Any]]) -> None:
    """Print the table of a Megatron run."""
    rows = [
        ["" if found["step"] is None else str(found["step"]), size_text(found["bytes"]), found["folder"],
         ", ".join(found["notes"])]
        for found in iterations
    ]  # fmt: skip
    print_table(("step", "size", "folder", "notes"), rows, right=(0, 1))
    click.echo("a Megatron run; holdfast show and convert take its root, with --step N for one of these")
