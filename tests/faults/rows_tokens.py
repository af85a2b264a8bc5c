"""Vocabularies that are resized while the process is killed, or the disk is full or broken, at every call in turn."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path

import torch

import holdfast
from holdfast.tokens.resize_vocabulary import ResizeOptions, resize_vocab
from tests.faults.operations import Operation, Outcome, Place, every_call, failing, killed
from tests.faults.row import Row, Tally

ERRORS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}
OPTIONS = ResizeOptions(size=96, keys=("*table*",))


def save_source(folder: Path) -> None:
    """Save a step of a model and its optimizer."""
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(40, 64), "other": torch.nn.Linear(64, 32)})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    holdfast.save(folder / "source", {"model": model, "optimizer": optimizer}, block_bytes=4096)


def _resizing(form: str) -> Operation:
    def resize(folder: Path, target: Path) -> None:
        resize_vocab(folder / "source", target, OPTIONS, to=form, force=True)

    return Operation(f"resize-vocab to {form}", save_source, resize)


RESIZES = {form: _resizing(form) for form in ("holdfast", "hf")}


def _every_resize(case: str, seed: int) -> Tally:
    total = Tally()
    for form, operation in RESIZES.items():

        def inject(place: Place, number: int) -> Outcome:
            return killed(place, number) if case == "kill" else failing(ERRORS[case], place, number)

        total += every_call(operation, False, inject, f"resize-vocab: {case}, {form}, seed {seed}")
    return total


ROWS = (
    Row("resize-vocab: SIGKILL at file system call k, every k", partial(_every_resize, "kill")),
    *(
        Row(f"resize-vocab: {name} at file system call k, from then on", partial(_every_resize, name))
        for name in ERRORS
    ),
)
