"""Saving in the background on several ranks: the same bytes on any number of hosts, one decision for all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.storage.identity import IDENTITY
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.sliced(4)

ROWS, COLUMNS = 1000, 257


def weights(dim: int) -> dict[str, DTensor]:
    """One tensor with known values, and a small one, sharded by `dim` over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    out = {}
    for name, shape in (("w", (ROWS, COLUMNS)), ("v", (7, 5))):
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
        local = whole.chunk(dist.get_world_size(), dim)
        mine = local[dist.get_rank()] if dist.get_rank() < len(local) else whole.narrow(dim, 0, 0)
        out[name] = DTensor.from_local(
            mine.contiguous(), mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return out


def save_twice(root: str, dim: int) -> tuple[int, list[str]]:
    """Two saves, the second by the standing plan; the bytes this rank's writer wrote, and what it hears of."""
    events: list[holdfast.Event] = []
    with holdfast.Checkpointer(root, block_bytes=16 * 4096, on_event=events.append) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": weights(dim), "note": {"step": step}}).result(60)
    written = [event.bytes for event in events if event.name == "written"]
    return written[-1], [event.name for event in events]


@pytest.mark.sliced(8)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("hosts", [["a"] * 4, ["a", "a", "b", "b"], ["a", "b", "c", "d"], ["a", "b", "a", "b"]])
def test_any_number_of_hosts_writes_the_same_bytes(tmp_path: Path, hosts: list[str], dim: int) -> None:
    results = run_ranks(4, save_twice, str(tmp_path / "run"), dim, hosts=hosts)
    (_, events), *_ = run_ranks(1, save_twice, str(tmp_path / "single"), dim)
    for step in ("step-000000000001", "step-000000000002"):
        names = sorted(path.name for path in (tmp_path / "single" / step).iterdir())
        assert names == sorted(path.name for path in (tmp_path / "run" / step).iterdir())
        for name in names:
            if name != "holdfast.json":
                data = (tmp_path / "run" / step / name).read_bytes()
                assert data == (tmp_path / "single" / step / name).read_bytes(), name
        assert holdfast.open(tmp_path / "run" / step).verify().good
    found = sorted(path.name for path in (tmp_path / "run").iterdir() if path.name != IDENTITY)
    assert found == ["step-000000000001", "step-000000000002"]
    size = sum(path.stat().st_size for path in (tmp_path / "run" / "step-000000000002").glob("*.safetensors"))
    written = sum(result[0] for result in results)
    assert written == size
    assert [name for name in events if name in ("planned", "captured", "published")] == [
        "planned", "captured", "published", "captured", "published",
    ]  # fmt: skip


def fsdp(unfrozen: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    for layer in model:
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters() if unfrozen else model[1].parameters())


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 16)).square().sum().backward()
    optimizer.step()


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    out = {f"model/{key}": value for key, value in model.state_dict().items()}
    keys = {id(param): key for key, param in model.named_parameters()}
    for param, state in optimizer.state.items():
        out |= {f"optimizer/{keys[id(param)]}/{name}": value for name, value in state.items()}
    return {key: value.full_tensor() if isinstance(value, DTensor) else value.clone() for key, value in out.items()}


def differences(checkpoint: holdfast.Checkpoint, expected: dict[str, torch.Tensor]) -> list[str]:
    stored = {f"{group}/{key}" for group in ("model", "optimizer") for key in checkpoint.keys(group)}
    wrong = sorted(stored ^ expected.keys())
    for key in stored & expected.keys():
        group, _, name = key.partition("/")
        if not torch.equal(torch.from_numpy(checkpoint.read(name, group)), expected[key]):
            wrong.append(f"{key} differs")
    return wrong


def grow(root: str) -> list[list[str]]:
    """Saves before the optimizer has state, after, and with one more param group."""
    model, optimizer = fsdp(unfrozen=False)
    out = []
    with holdfast.Checkpointer(root) as checkpointer:
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.5})
            state = {"model": model, "optimizer": optimizer}
            expected = full_state(model, optimizer)
            handle = checkpointer.save(step, state)
            step_once(model, optimizer)
            out.append(differences(handle.result(60), expected))
    return out


def test_state_that_comes_later_is_saved_and_nothing_stale(tmp_path: Path) -> None:
    for wrong in run_ranks(2, grow, str(tmp_path)):
        assert wrong == [[], [], [], []]


def unfreeze_on_one(root: str) -> list[Any]:
    """A plain tensor that appears on rank 1 alone, then goes again."""
    shared = torch.ones(4)
    extra = {"late": torch.full((3,), 7.0)}
    out: list[Any] = []
    with holdfast.Checkpointer(root) as checkpointer:
        for step in range(3):
            tensors = {"shared": shared}
            if step == 1 and dist.get_rank() == 1:
                tensors |= extra
            handle = checkpointer.save(step, {"w": tensors})
            out.append(handle.result(60).keys("w"))
    return out


def test_a_tensor_on_one_rank_only_is_planned_anew(tmp_path: Path) -> None:
    for keys in run_ranks(2, unfreeze_on_one, str(tmp_path)):
        assert keys == [["shared"], ["late", "shared"], ["shared"]]


def diverge(root: str) -> list[Any]:
    """A value that all ranks share at first, and that differs later."""
    out: list[Any] = []
    with holdfast.Checkpointer(root) as checkpointer:
        for step in range(3):
            value = step if step < 2 else dist.get_rank()
            checkpoint = checkpointer.save(step, {"w": torch.ones(4), "seen": value}).result(60)
            out.append(checkpoint.state["seen"].get("value", checkpoint.state["seen"].get("values")))
    return out


def test_a_value_that_starts_to_differ_is_kept_by_rank(tmp_path: Path) -> None:
    for values in run_ranks(2, diverge, str(tmp_path)):
        assert values[:2] == [0, 1] and set(values[2].values()) == {0, 1}


def differ_in_step(root: str) -> str:
    """The ranks name different steps once; the next save works."""
    with holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(4)}).result(60)
        handle = checkpointer.save(2 + dist.get_rank(), {"w": torch.ones(4)})
        error = type(handle.error).__name__
        checkpointer.save(5, {"w": torch.ones(4)}).result(60)
        return error


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    assert run_ranks(2, differ_in_step, str(tmp_path)) == ["LayoutError"] * 2
    assert holdfast.Checkpointer(tmp_path).steps() == [1, 5]


def skip(root: str) -> list[Any]:
    out: list[Any] = []
    with holdfast.Checkpointer(root, on_busy="skip", deadline_s=60) as checkpointer:
        checkpointer.save(0, {"w": weights(0)}).result(60)
        if dist.get_rank() == 1:
            os.kill(checkpointer._engine.background.writer.pid, 19)  # SIGSTOP: its part stays unwritten
        first = checkpointer.save(1, {"w": weights(0)})
        second = checkpointer.save(2, {"w": weights(0)})
        out.append((first.done(), second.skipped, repr(second)))
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(checkpointer._engine.background.writer.pid, 18)
        first.result(60)
        dist.barrier()
        out.append(checkpointer.save(3, {"w": weights(0)}).result(60).step)
    return out


def test_a_busy_writer_is_skipped_by_all_ranks_alike(tmp_path: Path) -> None:
    for (first_done, second_skipped, text), last in run_ranks(2, skip, str(tmp_path)):
        assert not first_done and second_skipped and "skipped" in text and last == 3
    assert holdfast.Checkpointer(tmp_path).steps() == [0, 1, 3]


def lose_writer(root: str, victim: int) -> list[Any]:
    """One rank's writer is killed in the middle of a save; training goes on and the next save works."""
    events: list[str] = []
    with holdfast.Checkpointer(root, on_event=lambda event: events.append(event.name)) as checkpointer:
        checkpointer.save(1, {"w": weights(0)}).result(60)
        pid = checkpointer._engine.background.writer.pid
        if dist.get_rank() == victim:
            os.kill(pid, 19)
        handle = checkpointer.save(2, {"w": weights(0)})
        if dist.get_rank() == victim:
            os.kill(pid, 9)
        handle.wait(60)
        after = checkpointer.save(3, {"w": weights(0)}).result(60).step
        return [type(handle.error).__name__, "failed" in events, after]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_writer_fails_one_save_on_all_ranks(tmp_path: Path, victim: int) -> None:
    for result in run_ranks(2, lose_writer, str(tmp_path), victim):
        assert result == ["PeerFailed", True, 3]
    assert holdfast.Checkpointer(tmp_path).steps() == [1, 3]


def save_restore_save(root: str) -> list[Any]:
    out: list[Any] = []
    with holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        model, optimizer = fsdp()
        state = {"model": model, "optimizer": optimizer}
        for step in (1, 2, 3):
            step_once(model, optimizer)
            expected = full_state(model, optimizer)
            handle = checkpointer.save(step, state)
            out.append(differences(handle.result(30), expected))
            assert checkpointer.restore(state) == step
    return out


def test_restoring_between_saves_does_not_disturb_them(tmp_path: Path) -> None:
    assert run_ranks(2, save_restore_save, str(tmp_path)) == [[[], [], []]] * 2


def too_slow(root: str) -> tuple[list[Any], list[int]]:
    """A save that outlasts its deadline is given up; its writer does not read what comes after it."""
    out: list[Any] = []
    with holdfast.Checkpointer(root, deadline_s=8.0) as checkpointer:
        big = torch.zeros(1 << 20)
        checkpointer.save(0, {"w": {"big": big}}).result(30)
        os.kill(checkpointer._engine.background.writer.pid, 19)
        first = checkpointer.save(1, {"w": {"big": big + 1}})
        second = checkpointer.save(2, {"w": {"big": big + 2}})
        out.append(type(first.error).__name__)
        stored = second.result(30).read("big", "w")
        out.append((float(stored.min()), float(stored.max())))
        return out, checkpointer.steps()


def test_a_save_that_is_given_up_publishes_nothing_torn(tmp_path: Path) -> None:
    for out, steps in run_ranks(1, too_slow, str(tmp_path)):
        assert out == ["PeerFailed", (2.0, 2.0)] and steps == [0, 2]


def fail_on_one(root: str) -> list[Any]:
    """One rank fails between the plan and the capture, once; the ranks are not out of step afterwards."""
    with holdfast.Checkpointer(root, deadline_s=30) as checkpointer:
        checkpointer.save(1, {"w": weights(0)}).result(30)
        background: Any = checkpointer._engine.background
        if dist.get_rank() == 1:
            start = background._capturer.copier.start
            background._capturer.copier.start = lambda *arguments: (_ for _ in ()).throw(RuntimeError("out of luck"))
        failed = checkpointer.save(2, {"w": weights(0)})
        failed.wait(30)
        if dist.get_rank() == 1:
            background._capturer.copier.start = start
        return [failed.error is not None, checkpointer.save(3, {"w": weights(0)}).result(30).step]


def test_ranks_stay_in_step_when_one_fails(tmp_path: Path) -> None:
    assert run_ranks(2, fail_on_one, str(tmp_path)) == [[True, 3]] * 2


def chance(root: str) -> list[str]:
    """Values that differ between ranks, and agree between some of them by chance."""
    errors = []
    with holdfast.Checkpointer(root, deadline_s=30) as checkpointer:
        for step in range(6):
            value = (step * (dist.get_rank() + 1)) % 3
            handle = checkpointer.save(step, {"w": weights(0), "seen": [dist.get_rank() // 2, value]})
            handle.wait(30)
            errors.append(str(handle.error or ""))
    return errors


@pytest.mark.full
def test_values_that_agree_by_chance_fail_no_save(tmp_path: Path) -> None:
    results = run_ranks(4, chance, str(tmp_path))
    assert next(sum(map(bool, errors)) for errors in results) <= 1, results[0]


def batch_norms(root: str) -> list[float]:
    """Buffers that differ after the first save: all of a buffer is one rank's."""
    module = nn.BatchNorm1d(5000)
    with holdfast.Checkpointer(root, block_bytes=4096) as checkpointer:
        checkpointer.save(0, {"model": module}).result(30)
        module.running_mean.fill_(float(dist.get_rank() + 1))
        stored = checkpointer.save(1, {"model": module}).result(30).read("running_mean")
        return sorted(set(stored.tolist()))


def test_a_buffer_is_never_a_mix_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(2, batch_norms, str(tmp_path)) == [[1.0]] * 2


def steps_right_after_restore(root: str) -> list[float]:
    """Losses of FSDP2 on this rank, of steps that follow a restore at once."""
    losses: list[float] = []
    for _ in range(4):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(20)]
        for block in blocks:
            fully_shard(block)
        model = nn.Sequential(*blocks)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        with holdfast.Checkpointer(root) as checkpointer:
            restored = checkpointer.restore({"model": model, "optimizer": optimizer})
            for _ in range(2 if restored else 1):
                loss = model(torch.ones(8, 32)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if restored is None:
                checkpointer.save(1, {"model": model, "optimizer": optimizer}).result(60)
            else:
                losses.append(loss.item())
    return losses


def test_one_rank_of_fsdp2_trains_while_its_first_save_gets_ready(tmp_path: Path) -> None:
    (losses,) = run_ranks(1, steps_right_after_restore, str(tmp_path))
    assert len(losses) == 3 and len(set(losses)) == 1
