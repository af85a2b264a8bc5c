"""A program that is added to a committed step: killed, and on a full disk, at every call. The step is never between."""

from __future__ import annotations

import errno
import shutil
from functools import partial
from pathlib import Path

import torch

import holdfast
from tests.faults.operations import Operation, every_call, failing, killed
from tests.faults.row import Row

SOURCE = "source"


def _net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def _save_step(folder: Path) -> None:
    """Write a step without a program, and the program as a file of its own."""
    model = _net()
    holdfast.save(folder / SOURCE, {"model": model, "note": 3}, files={"notes/a.txt": "hello"})
    (folder / "net.json").write_bytes(holdfast.export_program(model, (torch.ones(1, 4),)).to_json())


def _add(folder: Path, target: Path) -> None:
    holdfast.add_program(target, holdfast.Program.from_json((folder / "net.json").read_bytes()))


def _copy_step(folder: Path, target: Path) -> None:
    shutil.copytree(folder / SOURCE, target)


ADDITION = Operation("add_program", _save_step, _add, _copy_step)

ROWS = (
    Row(
        "add_program: SIGKILL at file system call k, every k",
        lambda seed: every_call(ADDITION, True, killed, f"SIGKILL, seed {seed}"),
    ),
    Row(
        "add_program: ENOSPC at file system call k, from then on",
        lambda seed: every_call(ADDITION, True, partial(failing, errno.ENOSPC), f"ENOSPC, seed {seed}"),
    ),
)
