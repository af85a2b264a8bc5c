"""A program added to a step on an object store: with every request of it going wrong, and a store that goes away."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.tags import add_tag, tagged
from holdfast.core.errors import HoldfastError
from holdfast.core.names import step_folder
from holdfast.storage.objects.store import ObjectStorage
from tests.objects.faults import Arena, arena, environment
from tests.objects.proxy import Plan
from tests.objects.server import Server
from tests.objects.test_branches import under


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@pytest.fixture(scope="module")
def program() -> holdfast.Program:
    return holdfast.export_program(net(), (torch.ones(1, 4),))


def save(step: str) -> None:
    holdfast.save(step, {"model": net(), "note": 3})


def require_whole(step: str, program: holdfast.Program) -> bool:
    """Return True if the step has the program; it must be whole with it or without."""
    found = holdfast.open(step)
    assert found.verify().good
    assert found.value("note") == 3
    fresh = {"model": net()}
    torch.nn.init.zeros_(fresh["model"][0].weight)
    holdfast.load(step, fresh, strict=False)
    assert torch.equal(fresh["model"][0].weight, net()[0].weight)
    assert found.program in (None, program)
    return found.program is not None


def test_a_program_is_added_to_a_step_of_a_run(root: str, program: holdfast.Program) -> None:
    with holdfast.Checkpointer(root) as run:
        for number in (1, 2):
            run.save(number, {"model": net(), "note": 3}).result(30)
    storage = ObjectStorage(root)
    before = committed_steps(storage)
    add_tag(storage, "release", before[0])
    step = under(root, step_folder(1))
    assert holdfast.add_program(step, program).program == program
    assert require_whole(step, program)
    after = committed_steps(storage)
    assert [entry.manifest.identity for entry in after] == [entry.manifest.identity for entry in before]
    assert after[0].manifest.attempt != before[0].manifest.attempt
    assert tagged(storage, after) == {step_folder(1): ["release"]}
    assert storage.hidden() == [".tags"]
    with holdfast.Checkpointer(root, keep=holdfast.keep.last(1)) as run:
        assert run.restore({"model": net(), "note": 0}) == 2
        run.save(3, {"model": net(), "note": 3}).result(30)
    assert [entry.step for entry in committed_steps(storage)] == [1, 3]
    module = holdfast.load_program(step)
    assert torch.equal(module(torch.ones(1, 4)), net()(torch.ones(1, 4)))


@pytest.mark.sliced(3)
@pytest.mark.parametrize("fault", ["503", "lost reply", "reset"])
def test_one_bad_request_does_not_matter(
    server: Server, program: holdfast.Program, pytestconfig: pytest.Config, fault: str
) -> None:
    with arena(server) as here, environment(server.environment()):
        step = under(here.storages()[0].address, step_folder(1))
        for number in range(1, 80, 1 if pytestconfig.getoption("full") else 13):
            save(step)
            plan = Plan(fault, number)
            assert add_through(here, step, program, plan)
            assert require_whole(step, program)
            if not plan.done:
                break
        assert number > 20


def add_through(here: Arena, step: str, program: holdfast.Program, plan: Plan) -> bool | None:
    """Add the program while requests go wrong by a plan; return True if it was acknowledged."""
    here.proxy.set(plan)
    try:
        with environment(here.server.environment(here.proxy.endpoint)):
            holdfast.add_program(step, program)
    except HoldfastError:
        return False
    finally:
        here.proxy.set(Plan())
    return True


@pytest.mark.full
def test_a_store_that_goes_away_leaves_the_one_or_the_other(
    server: Server, program: holdfast.Program, pytestconfig: pytest.Config
) -> None:
    with arena(server) as here, environment(server.environment()):
        step = under(here.storages("deadline_s=1&timeout_s=1")[0].address, step_folder(1))
        save(step)
        counting = Plan("503", 1_000_000)
        assert add_through(here, step, program, counting)
        chosen = range(1, counting.seen + 1)
        for number in chosen if pytestconfig.getoption("full") else (2, *chosen[::-20]):
            save(step)
            acknowledged = add_through(here, step, program, Plan("503", number, 1_000_000))
            added = require_whole(step, program)
            assert added or not acknowledged
            assert not added or number > counting.seen // 2, "the exchange is one of the last requests"
            assert holdfast.add_program(step, program).program == program
