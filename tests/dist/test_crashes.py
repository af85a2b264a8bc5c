"""Trainers that die: what was captured is published by the writers, what was not leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import find_files
from holdfast.engine.recovery import Leftovers
from holdfast.storage.identity import IDENTITY
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_card import captured_sets, read_cards
from tests.dist.harness import Victims, run_ranks, tell_parent
from tests.dist.test_background import weights

pytestmark = pytest.mark.sliced(4)


def leftovers(root: Path) -> list[str]:
    """What is under the root beside committed steps, and in shared memory for it."""
    run = run_id(LocalStorage(root))
    hidden = [path.name for path in root.glob(".*") if path.name != IDENTITY]
    return hidden + [path.name for path in find_files(run)]


def wait_until(true: Any, deadline_s: float = 90.0) -> None:
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.02)


def state(step: int, elements: int = 1 << 20) -> dict[str, Any]:
    return {"w": {"big": torch.full((elements,), float(step)), **weights(0)}, "step": step}


def save_and_wait(root: str, hold: str) -> None:
    """Save step 1, start to save step 2, tell the parent, and train on until killed."""
    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16)
    checkpointer.save(1, state(1)).result(60)
    if hold:
        os.kill(checkpointer._engine.background.writer.pid, signal.SIGSTOP)
    checkpointer.save(2, state(2))
    tell_parent(checkpointer._engine.background.writer.pid)
    time.sleep(600)


def begin_again(root: str) -> tuple[Any, list[str], float]:
    fresh: dict[str, Any] = state(0)
    with warnings.catch_warnings(record=True) as caught, holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        warnings.simplefilter("always")
        found = checkpointer.restore(fresh)
        value = float(fresh["w"]["big"][0])
    assert fresh["step"] == found
    return found, [str(warning.message) for warning in caught], value


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.1, 1.0])
def test_killed_trainers_leave_a_checkpoint(tmp_path: Path, delay_s: float) -> None:
    victims = Victims(2, save_and_wait, str(tmp_path), "")
    victims.hear()
    time.sleep(delay_s)
    victims.kill()
    results = run_ranks(2, begin_again, str(tmp_path))
    assert [found for found, _, _ in results] == [2, 2] and results[0][2] == 2.0
    assert holdfast.open(tmp_path / "step-000000000002").verify().good
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
def test_a_killed_process_group_is_survived_too(tmp_path: Path) -> None:
    """Launchers such as torchrun kill the whole process group."""
    code = (
        "import torch, holdfast, time, sys\n"
        f"ck = holdfast.Checkpointer({str(tmp_path)!r})\n"
        "ck.save(1, {'w': torch.ones(5_000_000)})\n"
        "print('saved', flush=True); time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=120)
    wait_until((tmp_path / "step-000000000001").exists)
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
def test_sigterm_is_heard_while_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    code = (
        "import os, signal, torch, holdfast\n"
        f"ck = holdfast.Checkpointer({str(tmp_path)!r}, grace_s=1)\n"
        "ck.save(1, {'w': torch.ones(1000)}).result(60)\n"
        "writer = ck._engine.background.writer.pid\n"
        "os.kill(writer, signal.SIGSTOP)\n"
        "ck.save(2, {'w': torch.ones(1000)})\n"
        "print(writer, flush=True)\n"
        "ck.save(3, {'w': torch.ones(1000)})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    writer = int(process.stdout.readline())
    time.sleep(0.5)
    process.terminate()
    process.communicate(timeout=120)  # without the signal it would wait for half an hour
    assert process.returncode == -signal.SIGTERM
    os.kill(writer, signal.SIGCONT)
    wait_until((tmp_path / "step-000000000002").exists)
    wait_until(lambda: not leftovers(tmp_path))


def die_before_capture(root: str, rank_that_dies: int) -> None:
    """One rank dies after the order and before its state is captured."""
    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16)
    checkpointer.save(1, state(1)).result(60)
    if dist.get_rank() == rank_that_dies:
        background: Any = checkpointer._engine.background
        background._hand_over = lambda flight, pending: None  # as if the copy were still going on
    checkpointer.save(2, state(2))
    tell_parent(True)
    time.sleep(600)


@pytest.mark.parametrize("rank_that_dies", [0, 1])
def test_what_was_not_captured_everywhere_is_not_published(tmp_path: Path, rank_that_dies: int) -> None:
    victims = Victims(2, die_before_capture, str(tmp_path), rank_that_dies)
    victims.hear()
    victims.kill()
    for found, _, value in run_ranks(2, begin_again, str(tmp_path)):
        assert found == 1 and value == 1.0
    wait_until(lambda: not leftovers(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.name != IDENTITY] == ["step-000000000001"]


def test_the_next_start_waits_for_living_writers(tmp_path: Path) -> None:
    victims = Victims(2, save_and_wait, str(tmp_path), "hold")
    writers = victims.hear()
    victims.kill()
    second = Victims(2, begin_again, str(tmp_path))
    time.sleep(3.0)
    assert not (tmp_path / "step-000000000002").exists() and leftovers(tmp_path)
    for writer in writers:
        os.kill(writer, signal.SIGCONT)
    for found, _, _ in second.hear():
        assert found == 2
    second.end()
    wait_until(lambda: not leftovers(tmp_path))


def test_dead_writers_leave_nothing_for_the_next_start(tmp_path: Path) -> None:
    victims = Victims(2, save_and_wait, str(tmp_path), "hold")
    writers = victims.hear()
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
    victims.kill()
    assert leftovers(tmp_path)
    for found, _, _ in run_ranks(2, begin_again, str(tmp_path)):
        assert found == 1
    wait_until(lambda: not leftovers(tmp_path))


def fail_to_write(root: str) -> None:
    """Step 1 is saved; step 2 is captured, but the storage refuses it."""
    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16)
    checkpointer.save(1, state(1)).result(60)
    if dist.get_rank() == 0:
        (Path(root) / "step-000000000002").mkdir()
        (Path(root) / "step-000000000002" / "thesis.txt").write_text("years of work")
    dist.barrier()
    handle = checkpointer.save(2, state(2))
    handle.wait(60)
    tell_parent(type(handle.error).__name__)
    time.sleep(600)


def restore_and_save(root: str) -> tuple[list[bool], int | None]:
    """Restore from memory and save until a save is not skipped: the state in memory is written meanwhile."""
    fresh: dict[str, Any] = state(0)
    skipped = []
    with warnings.catch_warnings(), holdfast.Checkpointer(root, deadline_s=60, on_busy="skip") as checkpointer:
        warnings.simplefilter("ignore")
        assert checkpointer.restore(fresh) == 2 and float(fresh["w"]["big"][0]) == 2.0
        for step in range(3, 2000):
            handle = checkpointer.save(step, fresh)
            skipped.append(handle.skipped)
            if not handle.skipped:
                return skipped, handle.result(60).manifest.parent
            time.sleep(0.05)
    raise AssertionError("every save was skipped")


@pytest.mark.full
@pytest.mark.parametrize("world", [4, 1])
def test_a_run_goes_on_while_its_state_is_written_from_memory(tmp_path: Path, world: int) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    victims.hear()
    victims.kill()
    (tmp_path / "step-000000000002" / "thesis.txt").unlink()
    (tmp_path / "step-000000000002").rmdir()
    results = run_ranks(world, restore_and_save, str(tmp_path))
    assert all(result == results[0] for result in results) and results[0][1] == 2
    assert holdfast.open(tmp_path / "step-000000000002").verify().good
    wait_until(lambda: not leftovers(tmp_path))


def test_what_only_memory_holds_is_restored_from_it(tmp_path: Path) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    assert victims.hear() == ["StorageError"] * 2
    victims.kill()
    (tmp_path / "step-000000000002" / "thesis.txt").unlink()
    (tmp_path / "step-000000000002").rmdir()
    results = run_ranks(2, begin_again, str(tmp_path))
    for found, _, value in results:
        assert found == 2 and value == 2.0
    assert any("restored from the memory of this host" in message for message in results[0][1])
    assert holdfast.open(tmp_path / "step-000000000002").verify().good, "and written at once"
    wait_until(lambda: not leftovers(tmp_path))


def peek_and_restore(root: str) -> tuple[Any, ...]:
    fresh: dict[str, Any] = state(0)
    with warnings.catch_warnings(), holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        warnings.simplefilter("ignore")
        peeks = [checkpointer.peek(), checkpointer.peek()]
        return [(peek.step, dict(peek.values)) for peek in peeks if peek], checkpointer.restore(fresh)


@pytest.mark.full
def test_a_peek_sees_what_only_memory_holds_and_leaves_it_there(tmp_path: Path) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    victims.hear()
    victims.kill()
    (tmp_path / "step-000000000002" / "thesis.txt").unlink()
    (tmp_path / "step-000000000002").rmdir()
    for peeks, restored in run_ranks(2, peek_and_restore, str(tmp_path)):
        assert [step for step, _ in peeks] == [2, 2] == [restored] * 2
        assert all(values["step"] == 2 for _, values in peeks)
    wait_until(lambda: not leftovers(tmp_path))


HOSTS = ["north", "north", "south", "south"]


def row_state(step: int) -> dict[str, Any]:
    """Rows that meet inside of blocks, so that hosts have to give each other bytes."""
    full = torch.arange(4 * 75 * 333, dtype=torch.float32).reshape(300, 333) + step
    rows = full.chunk(4)[dist.get_rank()].clone()
    mesh = init_device_mesh("cpu", (4,))
    return {"w": {"rows": DTensor.from_local(rows, mesh, [Shard(0)])}, "step": step, "own": torch.tensor([step])}


def fail_on_two_hosts(root: str) -> None:
    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16)
    checkpointer.save(1, row_state(1)).result(60)
    if dist.get_rank() == 0:
        (Path(root) / "step-000000000002").mkdir()
        (Path(root) / "step-000000000002" / "thesis.txt").write_text("years of work")
    dist.barrier()
    handle = checkpointer.save(2, row_state(2))
    handle.wait(60)
    tell_parent(type(handle.error).__name__)
    time.sleep(600)


def begin_rows_again(root: str) -> tuple[Any, list[str], bool]:
    fresh = row_state(0)
    with warnings.catch_warnings(record=True) as caught, holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        warnings.simplefilter("always")
        found = checkpointer.restore(fresh)
    right = bool(torch.equal(fresh["w"]["rows"].to_local(), row_state(found or 0)["w"]["rows"].to_local()))
    return found, [str(warning.message) for warning in caught], right


@pytest.mark.full
@pytest.mark.parametrize("hosts", [HOSTS, ["south", "north", "south", "north"]])
def test_the_memory_of_several_hosts_is_written_by_the_next_start(tmp_path: Path, hosts: list[str]) -> None:
    victims = Victims(4, fail_on_two_hosts, str(tmp_path), hosts=HOSTS)
    assert victims.hear() == ["StorageError"] * 4
    victims.kill()
    (tmp_path / "step-000000000002" / "thesis.txt").unlink()
    (tmp_path / "step-000000000002").rmdir()
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=hosts)
    assert [(found, right) for found, _, right in results] == [(2, True)] * 4
    assert any("restored from the memory of its hosts" in message for message in results[0][1])
    assert holdfast.open(tmp_path / "step-000000000002").verify().good
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
def test_memory_waits_for_storage_that_works_again(tmp_path: Path) -> None:
    victims = Victims(4, fail_on_two_hosts, str(tmp_path), hosts=HOSTS)
    victims.hear()
    victims.kill()
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=HOSTS)
    assert [found for found, _, _ in results] == [1] * 4, "the storage still refuses step 2"
    shutil.rmtree(tmp_path / "step-000000000002")
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=HOSTS)
    assert [(found, right) for found, _, right in results] == [(2, True)] * 4
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("gone", ["north", "south"])
def test_a_host_that_lost_its_memory_means_the_older_checkpoint(tmp_path: Path, gone: str) -> None:
    victims = Victims(4, fail_on_two_hosts, str(tmp_path), hosts=HOSTS)
    victims.hear()
    victims.kill()
    run = run_id(LocalStorage(tmp_path))
    wait_until(lambda: sum(path.name.endswith(".card") for path in find_files(run)) == 4)
    for path in find_files(run):
        if path.name.endswith(".card") and f'"host":"{gone}"' in path.read_text():
            path.unlink()
            Path(str(path).removesuffix(".card")).unlink()
    shutil.rmtree(tmp_path / "step-000000000002")
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=HOSTS)
    assert [(found, right) for found, _, right in results] == [(1, True)] * 4
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
def test_spoiled_memory_of_several_hosts_is_not_written(tmp_path: Path) -> None:
    victims = Victims(4, fail_on_two_hosts, str(tmp_path), hosts=HOSTS)
    victims.hear()
    victims.kill()
    run = run_id(LocalStorage(tmp_path))
    wait_until(lambda: sum(path.name.endswith(".card") for path in find_files(run)) == 4)
    arena = next(path for path in find_files(run) if not path.name.endswith(".card"))
    with arena.open("r+b") as file:
        file.seek(9000)
        byte = file.read(1)[0]
        file.seek(9000)
        file.write(bytes([byte ^ 1]))
    shutil.rmtree(tmp_path / "step-000000000002")
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=HOSTS)
    assert [(found, right) for found, _, right in results] == [(1, True)] * 4
    assert any("in memory" in message for message in results[0][1])
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
def test_who_deletes_the_root_begins_anew(tmp_path: Path) -> None:
    root = tmp_path / "run"
    victims = Victims(2, fail_to_write, str(root))
    victims.hear()
    victims.kill()
    shutil.rmtree(root)
    for found, _, value in run_ranks(2, restore_or_none, str(root)):
        assert found is None and value == 0.0
    wait_until(lambda: not leftovers(root))


def restore_or_none(root: str) -> tuple[Any, list[str], float]:
    fresh: dict[str, Any] = state(0)
    with holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        return checkpointer.restore(fresh), [], float(fresh["w"]["big"][0])


def fail_and_raise(root: str) -> None:
    """As `fail_to_write`, but the program ends by an exception."""
    with holdfast.Checkpointer(root, block_bytes=1 << 16) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
        if dist.get_rank() == 0:
            (Path(root) / "step-000000000002").mkdir()
            (Path(root) / "step-000000000002" / "thesis.txt").write_text("years of work")
        dist.barrier()
        checkpointer.save(2, state(2)).wait(60)
        tell_parent(True)
        raise RuntimeError("the loss is not a number")


def save_twice_and_wait(root: str) -> None:
    """Steps are saved under FSDP2-like shards; the trainers are killed when the last is captured."""
    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16)
    checkpointer.restore({**row_state(0)}, strict=False)
    checkpointer.save(1, row_state(1)).result(60)
    checkpointer.save(2, row_state(2))
    tell_parent(True)
    time.sleep(600)


def test_once_it_is_published_killed_trainers_leave_no_memory(tmp_path: Path) -> None:
    victims = Victims(4, save_twice_and_wait, str(tmp_path))
    victims.hear()
    victims.kill()
    wait_until((tmp_path / "step-000000000002").exists)
    wait_until(lambda: not leftovers(tmp_path), 30)


def get_ready_and_wait(root: str) -> None:
    model = torch.nn.Linear(100, 100)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    checkpointer = holdfast.Checkpointer(root)
    checkpointer.prepare(state)
    checkpointer._engine.background._arena._thread.join(60)
    tell_parent(True)
    time.sleep(600)


def test_trainers_that_die_before_their_first_save_leave_no_memory(tmp_path: Path) -> None:
    victims = Victims(2, get_ready_and_wait, str(tmp_path))
    victims.hear()
    assert leftovers(tmp_path)
    victims.kill()
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
def test_a_start_on_fewer_hosts_says_what_is_missing_and_keeps_its_part(tmp_path: Path) -> None:
    victims = Victims(4, fail_on_two_hosts, str(tmp_path), hosts=HOSTS)
    victims.hear()
    victims.kill()
    shutil.rmtree(tmp_path / "step-000000000002")
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=["north"] * 4)
    assert [found for found, _, _ in results] == [1] * 4
    assert any("has only part of it" in message for message in results[0][1])
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=HOSTS)
    assert [(found, right) for found, _, right in results] == [(2, True)] * 4
    wait_until(lambda: not leftovers(tmp_path))


def restore_an_older_step(root: str) -> Any:
    with holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        return checkpointer.restore(state(0), step=1)


@pytest.mark.full
def test_who_asks_for_an_older_step_leaves_memory_alone(tmp_path: Path) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    victims.hear()
    victims.kill()
    shutil.rmtree(tmp_path / "step-000000000002")
    assert run_ranks(2, restore_an_older_step, str(tmp_path)) == [1, 1]
    for found, _, value in run_ranks(2, begin_again, str(tmp_path)):
        assert found == 2 and value == 2.0
    assert holdfast.open(tmp_path / "step-000000000002").manifest.parent == 1
    wait_until(lambda: not leftovers(tmp_path))


def tell_and_wait(self: Leftovers, ranks: Any) -> set[int]:
    tell_parent(True)
    time.sleep(600)
    return set()


def spoil_and_die(root: str) -> None:
    """Adopt memory that was spoiled, and die before it is given back."""
    Leftovers.drop = tell_and_wait
    holdfast.Checkpointer(root, deadline_s=60).restore(row_state(0))


@pytest.mark.full
def test_spoiled_memory_gets_no_new_card(tmp_path: Path) -> None:
    victims = Victims(4, fail_on_two_hosts, str(tmp_path), hosts=HOSTS)
    victims.hear()
    victims.kill()
    run = run_id(LocalStorage(tmp_path))
    wait_until(lambda: sum(path.name.endswith(".card") for path in find_files(run)) == 4)
    for card in read_cards([path for path in find_files(run) if path.name.endswith(".card")]):
        for travel in card.job.travel:
            with Path(card.arena).open("r+b") as file:
                file.seek(travel.copies[0].source)
                byte = file.read(1)[0]
                file.seek(travel.copies[0].source)
                file.write(bytes([byte ^ 1]))
    shutil.rmtree(tmp_path / "step-000000000002")
    second = Victims(4, spoil_and_die, str(tmp_path), hosts=HOSTS)
    second.hear()
    second.kill()
    results = run_ranks(4, begin_rows_again, str(tmp_path), hosts=HOSTS)
    assert [(found, right) for found, _, right in results] == [(1, True)] * 4


@pytest.mark.full
def test_an_exception_keeps_what_only_memory_holds(tmp_path: Path) -> None:
    victims = Victims(2, fail_and_raise, str(tmp_path))
    victims.hear()
    victims.end()
    shutil.rmtree(tmp_path / "step-000000000002")
    for found, _, value in run_ranks(2, begin_again, str(tmp_path)):
        assert found == 2 and value == 2.0
    wait_until(lambda: not leftovers(tmp_path))


def test_memory_that_was_spoiled_is_not_restored_from(tmp_path: Path) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    victims.hear()
    victims.kill()
    run = run_id(LocalStorage(tmp_path))
    arenas = [path for path in find_files(run) if not path.name.endswith(".card")]
    wait_until(lambda: len(captured_sets(run)) == 1)
    with arenas[0].open("r+b") as file:
        file.seek(5000)
        byte = file.read(1)[0]
        file.seek(5000)
        file.write(bytes([byte ^ 1]))
    (tmp_path / "step-000000000002" / "thesis.txt").unlink()
    (tmp_path / "step-000000000002").rmdir()
    results = run_ranks(2, begin_again, str(tmp_path))
    for found, _, value in results:
        assert found == 1 and value == 1.0
    assert any("step 2 in memory" in message for message in results[0][1])
    wait_until(lambda: not leftovers(tmp_path))


def test_sigterm_finishes_the_save_in_flight(tmp_path: Path) -> None:
    code = (
        "import torch, holdfast, time, sys, os, signal\n"
        f"ck = holdfast.Checkpointer({str(tmp_path)!r}, grace_s=120)\n"
        "ck.save(1, {'w': torch.ones(1000)}).result()\n"
        "os.kill(ck._engine.background.writer.pid, signal.SIGSTOP)\n"
        "ck.save(2, {'w': torch.ones(1000)})\n"
        "print(ck._engine.background.writer.pid, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        writer = int(process.stdout.readline())
        process.terminate()
        time.sleep(0.5)
        assert process.poll() is None, "it waits for the writer"
        os.kill(writer, signal.SIGCONT)
        assert process.wait(150) == -signal.SIGTERM
    assert (tmp_path / "step-000000000002").exists()
    wait_until(lambda: not leftovers(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "raise RuntimeError('boom')", "del ck"])
def test_exit_without_close_finishes_what_is_in_flight(tmp_path: Path, ending: str) -> None:
    code = (
        "import torch, holdfast\n"
        f"ck = holdfast.Checkpointer({str(tmp_path)!r})\n"
        f"ck.save(1, {{'w': torch.ones(1_000_000)}})\n{ending}\n"
    )
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert result.returncode == {"": 0, "raise SystemExit(3)": 3, "raise RuntimeError('boom')": 1, "del ck": 0}[ending]
    wait_until((tmp_path / "step-000000000001").exists)
    wait_until(lambda: not leftovers(tmp_path))


def lose_one_of_two(root: str) -> None:
    """Rank 1 and its writer die before its capture; rank 0 dies later, its writer waits for what will not come."""
    checkpointer = holdfast.Checkpointer(root, block_bytes=1 << 16, silence_s=3.0)
    checkpointer.save(1, state(1)).result(60)
    background: Any = checkpointer._engine.background
    if dist.get_rank() == 1:
        background._hand_over = lambda flight, pending: None
    checkpointer.save(2, state(2))
    tell_parent(background.writer.pid)
    time.sleep(600)


@pytest.mark.full
def test_a_writer_does_not_wait_for_the_dead(tmp_path: Path) -> None:
    victims = Victims(2, lose_one_of_two, str(tmp_path))
    writers = victims.hear()
    victims.processes[1].kill()
    os.kill(writers[1], signal.SIGKILL)
    victims.kill()
    wait_until(lambda: not Path(f"/proc/{writers[0]}").exists(), 120.0)
    for found, _, _ in run_ranks(2, begin_again, str(tmp_path)):
        assert found == 1
    wait_until(lambda: not leftovers(tmp_path))


def restore_model_only(root: str) -> int | None:
    with warnings.catch_warnings(), holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        warnings.simplefilter("ignore")
        return checkpointer.restore({"step": 0})


@pytest.mark.full
def test_a_partial_restore_writes_all_that_memory_holds(tmp_path: Path) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    victims.hear()
    victims.kill()
    (tmp_path / "step-000000000002" / "thesis.txt").unlink()
    (tmp_path / "step-000000000002").rmdir()
    assert run_ranks(2, restore_model_only, str(tmp_path)) == [2, 2]
    assert holdfast.open(tmp_path / "step-000000000002").verify().good
    assert [(found, value) for found, _, value in run_ranks(2, begin_again, str(tmp_path))] == [(2, 2.0)] * 2
    wait_until(lambda: not leftovers(tmp_path))


def begin_without_restoring(root: str) -> None:
    with holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        checkpointer.save(1, state(7)).result(60)


@pytest.mark.full
def test_a_run_that_begins_anew_forgets_what_memory_holds(tmp_path: Path) -> None:
    victims = Victims(2, fail_to_write, str(tmp_path))
    victims.hear()
    victims.kill()
    run_ranks(2, begin_without_restoring, str(tmp_path))
    assert [value for _, _, value in run_ranks(2, begin_again_from_one, str(tmp_path))] == [7.0, 7.0]


def begin_again_from_one(root: str) -> tuple[Any, list[str], float]:
    fresh: dict[str, Any] = state(0)
    with warnings.catch_warnings(), holdfast.Checkpointer(root, deadline_s=60) as checkpointer:
        warnings.simplefilter("ignore")
        found = checkpointer.restore(fresh)
    return found, [], float(fresh["w"]["big"][0])


@pytest.mark.full
@pytest.mark.parametrize("order", ["chain", "closed first", "forked"])
def test_sigterm_ends_the_process_whatever_is_stacked(tmp_path: Path, order: str) -> None:
    parts = {
        "chain": "before = signal.getsignal(15); signal.signal(15, lambda n, f: before(n, f))\n",
        "closed first": "other = make('b'); ck.close()\n",
        "forked": "pid = os.fork()\nif pid == 0: time.sleep(300); os._exit(7)\n"
        "time.sleep(1); os.kill(pid, 15); os.waitpid(pid, 0)\n",
    }
    code = (
        "import torch, holdfast, time, os, signal\n"
        f"def make(name):\n    ck = holdfast.Checkpointer({str(tmp_path)!r} + '/' + name)\n"
        "    ck.save(1, {'w': torch.ones(10)}).result(); return ck\n"
        f"ck = make('a')\n{parts[order]}os.kill(os.getpid(), 15); time.sleep(300)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=200)
    assert done.returncode == -signal.SIGTERM, done.stderr
