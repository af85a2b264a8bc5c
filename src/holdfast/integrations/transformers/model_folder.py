"""`save_model` of a sharded model: a plain Hugging Face folder, written by all ranks without gathering the model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from holdfast.adapters.comm import current_ranks
from holdfast.api import save
from holdfast.core.names import MANIFEST, STATE
from holdfast.core.ranks import run_on_all_ranks

_WORK = ".holdfast-model"
# Weights that an earlier save may have left, in other files than the new ones.
_STALE = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "pytorch_model*.bin*")


def save_model_folder(trainer: Any, output_dir: str, files: dict[str, bytes], deadline_s: float) -> None:
    """Save the model and its processing class into a folder that may hold other files, such as steps. Collective."""
    ranks = current_ranks(deadline_s)
    work = Path(output_dir).absolute() / _WORK

    def clear() -> None:
        if ranks.rank == 0:
            work.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(work, ignore_errors=True)

    run_on_all_ranks(ranks, clear)
    save(work, {"model": trainer.model}, files=files if ranks.rank == 0 else None, deadline_s=deadline_s)
    run_on_all_ranks(ranks, lambda: _move(work) if ranks.rank == 0 else None)


def _move(work: Path) -> None:
    """Move the files of the model out of the checkpoint: what makes it one stays behind and goes."""
    target = work.parent
    for pattern in _STALE:
        for path in target.glob(pattern):
            path.unlink()
    for path in sorted(work.iterdir()):
        if path.name in (MANIFEST, STATE):
            continue
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
        else:
            path.replace(target / path.name)
    shutil.rmtree(work)
