"""Paths of checkpoints as people type them: `runs/llama/step-40`, or a root with `--step 40`, Megatron's too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from holdfast.checkpoint.catalog import living_steps
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.core.names import folder_step, iteration_step, step_folder
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
        steps = () if ctx is None else ctx.meta.get(_STEP, ())
        if not steps:
            return with_full_step_name(path)
        is_second = param is not None and param.name == "second"
        return folder_of_step(path, steps[-1] if is_second else steps[0])

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def _keep(ctx: click.Context, param: click.Parameter, steps: int | tuple[int, ...] | None) -> None:
    ctx.meta[_STEP] = steps if isinstance(steps, tuple) else () if steps is None else (steps,)
    if len(ctx.meta[_STEP]) > 2:
        raise click.BadParameter("at most two steps, one for each path", ctx, param)


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


# Of a command with the arguments FIRST and SECOND.
two_steps_option = click.option(
    "--step",
    type=click.IntRange(0),
    multiple=True,
    callback=_keep,
    expose_value=False,
    is_eager=True,
    metavar="N",
    help="Use step N of a root; given twice, one for each path. [default: the newest]",
)


def with_full_step_name(path: str) -> str:
    """Write out the name of a step's folder, unless there is a folder step-40.

    step-40 is step-000000000040, or iter_0000040 of a Megatron run.
    """
    match = _SHORT.fullmatch(path)
    if match is None:
        return path
    step = int(match["step"])
    names = (step_folder(step), f"iter_{step:07d}")
    full = [f"{match['root'] or ''}{name}{match['options']}" for name in names]
    if path in full or _exists(path):
        return path
    return next((other for other in full if _exists(other)), path)


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


def is_step_folder(path: str) -> bool:
    """Return True for the folder of a step or of an iteration of Megatron, which a root or --step may stand for."""
    name = path.partition("?")[0].rstrip("/").rpartition("/")[2]
    return folder_step(name) is not None or iteration_step(name) is not None


def _steps_text(storage: SharedStorage, iterations: list[int]) -> str:
    steps = [str(step) for step in [entry.step for entry in living_steps(storage)] or iterations]
    if not steps:
        return "it has no steps"
    shown = ", ".join(steps[-_LISTED:])
    return f"it has {shown}" if len(steps) <= _LISTED else f"its newest are {shown}"
