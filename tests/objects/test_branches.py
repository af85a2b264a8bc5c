"""Retention, tags, rewinds and fallback on an object store: the same rules as on a disk."""

from __future__ import annotations

import torch
from click.testing import CliRunner

import holdfast
from holdfast import keep
from holdfast.cli.main import cli
from holdfast.storage import storage_at


def state_of(value: float) -> dict[str, object]:
    return {"weights": {"w": torch.full((4, 3), float(value))}}


def value_of(state: dict[str, object]) -> float:
    return float(state["weights"]["w"][0, 0])


def under(root: str, folder: str) -> str:
    address, _, options = root.partition("?")
    return f"{address}/{folder}?{options}"


def call(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_a_run_keeps_what_its_policy_says_and_gc_knows_it(root: str) -> None:
    with holdfast.Checkpointer(root, keep=keep.last(2)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state_of(step)).result()
            if step == 1:
                call("tag", root, "first")
        assert checkpointer.steps() == [1, 2, 3]
        checkpointer.save(4, state_of(4)).result()
        assert checkpointer.steps() == [1, 3, 4]
    call("tag", root, "first", "--delete")
    storage_at(root).sweep()
    assert "policy: last(2)" in call("gc", root)
    assert holdfast.Checkpointer(root).steps() == [3, 4]
    assert holdfast.open(under(root, "step-000000000003")).verify().good


def test_the_first_commit_after_a_rewind_sets_later_steps_aside(root: str) -> None:
    with holdfast.Checkpointer(root) as checkpointer:
        for step in (1, 2, 3, 4):
            checkpointer.save(step, state_of(step)).result()
        state = state_of(0.0)
        assert checkpointer.restore(state, step=2) == 2 and value_of(state) == 2.0
        checkpointer.save(4, state_of(44.0)).result()
        assert checkpointer.steps() == [1, 2, 4]
    folders = storage_at(root).folders()
    assert [name for name in folders if name.startswith("abandoned")] == [
        "abandoned-step-000000000003",
        "abandoned-step-000000000004",
    ]
    holdfast.load(under(root, "abandoned-step-000000000004"), state)
    assert value_of(state) == 4.0
    with holdfast.Checkpointer(root) as checkpointer:
        assert checkpointer.restore(state) == 4 and value_of(state) == 44.0
