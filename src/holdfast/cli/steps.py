"""Paths of checkpoints as people type them: `runs/llama/step-40`, or a root with `--step 40`, Megatron's too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from holdfast.checkpoint.catalog import living_steps
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.core.names import iteration_step, step_folder
from holdfast.storage import is_checkpoint, shared_storage_at
from holdfast.storage.base import SharedStorage

_STEP = "holdfast.step"
_SHORT = re.compile(r"(?P<root>.*/)?step-(?P<step>[0-9]{1,18})(?P<options>/?(?:\?.*)?)")
_LISTED = 8  # steps named in an error


class CheckpointPath(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.3 on
    """The path of a checkpoint or of a root. `step-40` means the folder of step 40; `--step` chooses one of a root."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path = str(value)
        step = None if ctx is None else ctx.meta.get(_STEP)
        return with_full_step_name(path) if step is None else folder_of_step(path, step)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def _keep(ctx: click.Context, param: click.Parameter, step: int | None) -> None:
    ctx.meta[_STEP] = step


# Read before the paths, whose type applies it.
step_option = click.option(
    "--step",
    type=click.IntRange(0),
    callback=_keep,
    expose_value=False,
    is_eager=True,
    metavar="N",
    help="Use step N of a root. [default: the newest]",
)


def with_full_step_name(path: str) -> str:
    """Write out the name of a step's folder: step-40 as step-000000000040, unless there is a folder step-40."""
    match = _SHORT.fullmatch(path)
    if match is None:
        return path
    full = f"{match['root'] or ''}{step_folder(int(match['step']))}{match['options']}"
    return path if full == path or _exists(path) or not _exists(full) else full


def _exists(path: str) -> bool:
    if "://" in path:
        return is_checkpoint(shared_storage_at(path))
    return Path(path).expanduser().exists()


def folder_of_step(path: str, step: int) -> str:
    """Return the path of a step of a root. Raises NotFound, with the steps that there are, if it has none such."""
    plain, mark, options = path.partition("?") if "://" in path else (path, "", "")
    if "://" not in path and Path(path).expanduser().is_file():
        raise InvalidArgument(f"--step {step} chooses a step of a root, and {path} is a file")
    storage = shared_storage_at(path)
    if not storage.exists():
        raise NotFound(f"{path}: no such folder")
    if is_checkpoint(storage):
        raise InvalidArgument(f"--step {step} chooses a step of a root, and {path} is a checkpoint; give its root")
    folders = storage.folders()
    iterations = {number: folder for folder in folders if (number := iteration_step(folder)) is not None}
    folder = step_folder(step) if step_folder(step) in folders else iterations.get(step)
    if folder is None:
        raise NotFound(f"{path} has no step {step}; {_steps_text(storage, sorted(iterations))}")
    return f"{plain.rstrip('/')}/{folder}{mark}{options}"


def _steps_text(storage: SharedStorage, iterations: list[int]) -> str:
    steps = [str(step) for step in [entry.step for entry in living_steps(storage)] or iterations]
    if not steps:
        return "it has no steps"
    shown = ", ".join(steps[-_LISTED:])
    return f"it has {shown}" if len(steps) <= _LISTED else f"its newest are {shown}"
