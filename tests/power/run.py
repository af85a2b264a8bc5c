"""The run whose power is cut: saves step after step, and says what was acknowledged when.

    python -m tests.power.run ROOT LOG FIRST COUNT

For every save one line of JSON: how long LOG was when it began and when it was acknowledged.
The steps are saved in three ways in turn: in the background, by a Checkpointer that has no memory
to capture into and so blocks, and by `holdfast.save`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast import keep
from holdfast.core.names import step_folder

PIECE = 8  # saves in one way, before the next way


def state_of(step: int) -> dict[str, Any]:
    """A state of a few blocks, all of one number."""
    return {"w": {"big": torch.full((40_000,), float(step)), "small": torch.full((7, 5), step)}, "step": step}


def is_state_of(state: dict[str, Any], step: int) -> bool:
    expected = state_of(step)
    same = all(torch.equal(state["w"][key], tensor) for key, tensor in expected["w"].items())
    return same and state["step"] == step


def save_some(root: Path, log: Path, steps: range, way: int) -> None:
    """Save the steps in one way, each with its line."""
    memory: dict[str, Any] = {} if way == 0 else {"arena_bytes": 1}
    with holdfast.Checkpointer(root, keep=keep.last(3), block_bytes=1 << 16, silence_s=1.0, **memory) as checkpointer:
        checkpointer.restore(state_of(0))
        for step in steps:
            began = log.stat().st_size
            if way == 2:
                holdfast.save(root / step_folder(step), state_of(step), step=step)
            else:
                checkpointer.save(step, state_of(step)).result(60)
            line = {"step": step, "began": began, "acknowledged": log.stat().st_size}
            os.write(1, json.dumps(line).encode() + b"\n")


def main(root: Path, log: Path, first: int, count: int) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for number, begin in enumerate(range(first, first + count, PIECE)):
        save_some(root, log, range(begin, min(begin + PIECE, first + count)), number % 3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
