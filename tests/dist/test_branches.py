"""Retention, rewinds and occasions are one decision for all ranks."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from tests.dist.harness import run_ranks


def sharded(value: float) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(torch.full((3, 2), float(value)), mesh, [Shard(0)])


def _state(value: float) -> dict[str, object]:
    return {"weights": {"w": sharded(value)}}


def _value(state: dict[str, object]) -> float:
    return float(state["weights"]["w"].to_local()[0, 0])


def _rewind(root: str) -> tuple[int | None, float, list[int], int | None, float]:
    with holdfast.Checkpointer(root, keep=holdfast.keep.last(2)) as checkpointer:
        for step in (1, 2, 3, 4, 5):
            checkpointer.save(step, _state(step)).result()
        dist.barrier()
        state = _state(0.0)
        found = checkpointer.restore(state, step=4)
        value = _value(state)
        checkpointer.save(5, _state(55.0)).result()
        steps = checkpointer.steps()
        dist.barrier()
    with holdfast.Checkpointer(root) as checkpointer:
        newest = checkpointer.restore(state)
        return found, value, steps, newest, _value(state)


@pytest.mark.full
def test_a_rewind_on_four_ranks_sets_the_later_step_aside(tmp_path: Path) -> None:
    answers = run_ranks(4, _rewind, str(tmp_path))
    assert answers == [(4, 4.0, [4, 5], 5, 55.0)] * 4
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert names == ["abandoned-step-000000000005", "step-000000000004", "step-000000000005"]


def _skip_and_go_on(root: str) -> tuple[int | None, list[int], int | None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with holdfast.Checkpointer(root, keep=holdfast.keep.last(1)) as checkpointer:
            if not checkpointer.steps():
                for step in (1, 2, 3):
                    checkpointer.save(step, _state(step)).result()
                return None, [], None
            found = checkpointer.restore(_state(0.0), move_damaged=True)
            checkpointer.save(4, _state(4.0)).result()
            return found, checkpointer.steps(), checkpointer.restore(_state(0.0))


@pytest.mark.full
def test_damage_that_one_rank_sees_is_moved_aside_for_all(tmp_path: Path) -> None:
    run_ranks(2, _save_three, str(tmp_path))
    tensors = next((tmp_path / "step-000000000003").glob("weights-*"))
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1  # in the last rank's rows
    tensors.write_bytes(bytes(data))
    assert run_ranks(2, _skip_and_go_on, str(tmp_path)) == [(2, [4], 4)] * 2
    names = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert names == ["damaged-step-000000000003", "step-000000000004"]


def _save_three(root: str) -> None:
    with holdfast.Checkpointer(root) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, _state(step)).result()


def _preempted(root: str) -> tuple[list[int], bool]:
    occasion = holdfast.when.steps(1000) | holdfast.when.preempted()
    with holdfast.Checkpointer(root, when=occasion) as checkpointer:
        state = _state(1.0)
        for step in range(1, 200):
            if step == 3 and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            dist.barrier()
            checkpointer.save_if_due(step, state)
            if checkpointer.preempted:
                break
        return checkpointer.steps(), checkpointer.preempted


def test_a_signal_that_one_rank_hears_saves_the_same_step_on_all(tmp_path: Path) -> None:
    (steps, told), (others, heard) = run_ranks(2, _preempted, str(tmp_path))
    assert told and heard and steps == others and len(steps) == 1 and steps[0] >= 3
