"""`load_program`: a program as a module that runs, with the weights of any checkpoint that has its keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound
from holdfast.core.names import PROGRAM_GROUP
from holdfast.engine.caller_ranks import ranks_of_call
from holdfast.engine.load import load_checkpoint
from holdfast.engine.options import DEADLINE_S, LoadOptions
from holdfast.program.model_program import Program
from holdfast.sources import open_stored
from holdfast.sources.paddle.optimizer_names import as_torch

if TYPE_CHECKING:
    from holdfast.adapters.program.program_module import ProgramModule

MODEL = "model"
_PathLike = str | os.PathLike[str]


def load_program(
    path: _PathLike | Checkpoint | Program,
    weights: _PathLike | Checkpoint | Mapping[str, Any] | Any = None,
    device: Any = None,
    *,
    cast: bool = False,
    verify: bool = True,
    deadline_s: float = DEADLINE_S,
) -> ProgramModule:
    """Return the program of a checkpoint as an nn.Module that runs without the class of the model.

    `path` is a checkpoint with a program, or a `Program`. `weights` are those of another checkpoint: any other step, a
    Hugging Face folder, or whatever else `holdfast.open` reads; a dict of tensors by key; or an nn.Module with the same
    keys. Without it the weights are those of `path`. The weights are made on `device`, by default torch's default
    device; with `device="meta"` none are read, so that the module can be sharded first and filled by `holdfast.load`.
    `cast` allows conversion of dtypes. Collective, as `holdfast.load` is.

    The module is called as the model was, is differentiable, and has the keys of the checkpoint in its state_dict.
    Nothing of the file is executed as Python: see docs/program.md. Raises NotFound if there is no program, Mismatch if
    weights are missing or of another shape, Unsupported if this torch has another schema of an operator, Damaged for
    a file that is no program.
    """
    ranks = ranks_of_call("holdfast.load_program", deadline_s)
    from holdfast.adapters.program.program_module import ProgramModule

    program, constants, source = _opened(path)
    module = ProgramModule(program, constants, where=str(getattr(source, "path", "the program")))
    if str(device) == "meta":
        return module
    given = source if weights is None else weights
    if given is None:
        raise InvalidArgument("a Program has no weights of its own: give weights=, or device='meta' to load them later")
    if isinstance(given, Checkpoint | str | os.PathLike):
        opened = given if isinstance(given, Checkpoint) else as_torch(open_stored(given))
        group = program.group if program.group in opened.groups else MODEL
        options = LoadOptions(
            strict=False,
            verify=verify,
            cast=cast,
            device=device,
            hub_keys=False,
            mapping={group: program.mapping} if program.mapping else None,
            reverse=bool(program.mapping),
        )
        report = load_checkpoint(ranks, lambda: opened, {group: module}, options, deadline_s=deadline_s)
        _require_all(opened.path, report.missing, report.mismatched)
    else:
        module.take_weights(given, device, cast=cast)
    module.to_device(device)
    return module


def _opened(path: _PathLike | Checkpoint | Program) -> tuple[Program, dict[str, Any], Checkpoint | None]:
    """Return a program, its constants, and the checkpoint that it is in."""
    if isinstance(path, Program):
        return path, dict(path.constants), None
    checkpoint = path if isinstance(path, Checkpoint) else open_stored(path)
    program = checkpoint.program
    if program is None:
        raise NotFound(
            f"{checkpoint.path} has no program: save it with program=holdfast.export_program(model, example_inputs), "
            "or add one with `holdfast.add_program(path, program)`"
        )
    keys = checkpoint.keys(PROGRAM_GROUP) if PROGRAM_GROUP in checkpoint.groups else []
    read = {key: checkpoint.read(key, PROGRAM_GROUP) for key in keys}
    return program, {**program.constants, **read}, checkpoint


def _require_all(path: str, missing: Any, mismatched: Any) -> None:
    texts = [f"missing: {key}" for key in missing] + [f"different: {text}" for text in mismatched]
    if texts:
        more = f"\n  and {len(texts) - 20} more" if len(texts) > 20 else ""
        raise Mismatch(f"{path} does not have the weights of the program:\n  " + "\n  ".join(texts[:20]) + more)
