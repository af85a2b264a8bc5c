"""A slice of the fault table for every test run, and proof that its judge can say no. `make faults` runs all of it."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.core.names import step_folder
from holdfast.storage.local import LocalStorage
from holdfast.testing.faults import Fault, FaultGate, faulty
from tests.faults import rows_merges, rows_powerloss, rows_races, rows_reading, rows_storage, rows_writer
from tests.faults.__main__ import find_rows, main, print_table
from tests.faults.row import HUNG, LOST, SURVIVED, WRONG, Row, Tally
from tests.faults.world import DEADLINE_S, JOBS, Hung, Job, World, in_child, judge, save, world

ONE = {1: frozenset({1})}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as made:
        yield made


# The slice


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
@pytest.mark.parametrize("number", [1, 8, 20])
def test_a_save_killed_at_a_storage_call(here: World, job: Job, number: int) -> None:
    with here.root() as root:
        assert rows_storage.killed_at_storage_call(root, job, number, "slice") == SURVIVED


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
@pytest.mark.parametrize("number", [3, 10, 16])
def test_a_save_killed_at_a_system_call(here: World, job: Job, number: int) -> None:
    with here.root() as root:
        assert rows_storage.killed_at_system_call(root, job, number, "slice") == SURVIVED


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
@pytest.mark.parametrize("number", [2, 11, 19])
def test_a_save_on_a_full_disk(here: World, job: Job, number: int) -> None:
    for lasting in (False, True):
        with here.root() as root:
            case = partial(rows_storage.failing_storage_call, "enospc", lasting)
            assert case(root, job, number, "slice") == SURVIVED


@pytest.mark.parametrize("number", [3, 12])
def test_a_merge_killed_at_a_storage_call(number: int) -> None:
    rows_merges.killed_at(number, occupied=True)


@pytest.mark.parametrize("number", [5, 14])
def test_a_merge_on_a_full_disk(number: int) -> None:
    rows_merges.full_at(number, occupied=True, lasting=True)


@pytest.mark.parametrize("name", rows_merges.UNFIT)
def test_a_merge_of_models_that_do_not_fit(name: str) -> None:
    rows_merges.refused(name, occupied=True)


@pytest.mark.parametrize("fault", [Fault("eio", 5), Fault("short", 3), Fault("corrupt", 4)], ids=str)
def test_a_load_from_a_bad_disk(here: World, fault: Fault) -> None:
    with here.root() as root:
        assert rows_reading.read_with(fault, root, "slice") == SURVIVED


@pytest.mark.full
def test_a_power_loss_after_operations_of_a_step_saved_again() -> None:
    assert rows_powerloss.power_loss(1, rows_powerloss.again, 1, every=3).good


@pytest.mark.full
def test_a_power_loss_after_an_fsync_that_failed() -> None:
    assert rows_powerloss.power_loss_after_failed_sync(0, rows_powerloss.fresh, 1, every=4).good


@pytest.mark.parametrize("name", rows_races.RACES)
def test_a_race_in_turns(here: World, name: str) -> None:
    with here.root() as root:
        assert rows_races.one_interleaving(root, *rows_races.RACES[name], 1) == SURVIVED


def test_a_writer_process_that_is_killed_full_or_silent(here: World) -> None:
    faults = [Fault("kill", 9), Fault("kill", 25), Fault("enospc", 5, rows_writer.WRITES), Fault("hang", 1, "publish")]
    assert rows_writer.wave(here, faults, 5.0) == [SURVIVED] * 4


# The judge and the table can say no


def test_a_lost_step_is_lost(here: World) -> None:
    with here.root() as root:
        assert judge(root, ONE, "test") == SURVIVED
        LocalStorage(root).remove(step_folder(1))
        assert judge(root, ONE, "test") == LOST


def test_a_step_of_another_state_is_lost(here: World) -> None:
    with here.root() as root:
        assert judge(root, {1: frozenset({2, None})}, "test") == LOST


def test_a_flipped_byte_is_wrong(here: World) -> None:
    with here.root() as root:
        file = next(Path(root / step_folder(1)).glob("model-*"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert judge(root, ONE, "test") == WRONG


def test_a_folder_without_a_manifest_is_wrong(here: World) -> None:
    with here.root() as root:
        os.mkdir(root / step_folder(2))
        assert judge(root, ONE, "test") == WRONG


def test_a_storage_that_publishes_too_early_is_found(here: World) -> None:
    """Visible before it is whole: a kill at some call leaves a step that is not one."""

    class Hasty(LocalStorage):
        def begin(self, attempt: str) -> None:
            super().begin(attempt)
            os.rename(self.root / attempt, self.root / step_folder(2))
            os.symlink(self.root / step_folder(2), self.root / attempt)

    found = []
    for number in (6, 12, 16):
        with here.root() as root:
            storage = faulty(Hasty(root), Fault("kill", number), quiet=True)
            in_child(lambda: save(storage, 2, 2))
            found.append(judge(root, JOBS[0].meanwhile, "test"))
    assert WRONG in found


def test_a_child_that_does_not_end_is_hung() -> None:
    with pytest.raises(Hung):
        in_child(lambda: FaultGate(Fault("hang")).call("any", "", int), deadline_s=0.3)
    assert in_child(lambda: None, DEADLINE_S) == (True, 0)


@pytest.mark.parametrize("tally", [LOST, WRONG, HUNG, Tally()])
def test_a_table_with_anything_bad_in_it_is_not_good(tally: Tally) -> None:
    out = io.StringIO()
    rows = [
        Row("good", lambda seed: SURVIVED),
        Row("bad", lambda seed: tally),
        Row("many", lambda seed: SURVIVED, False),
    ]
    assert print_table(rows[:1], 5, Console(file=out, width=120))
    assert not print_table(rows, 5, Console(file=out, width=120))
    assert "counted (and 1 not counted)" in out.getvalue()


def test_a_row_that_breaks_is_wrong_and_the_rest_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    seeds: list[int] = []

    def survive(seed: int) -> Tally:
        seeds.append(seed)
        return SURVIVED

    rows = [Row("breaks", lambda seed: Tally(1 // 0)), Row("good", survive)]
    assert not print_table(rows, 7, Console(file=io.StringIO()))
    assert seeds == [7]
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_rows_of_every_module_are_found() -> None:
    faults = [row.fault for row in find_rows()]
    assert len(faults) == len(set(faults)) > 20
    assert all("power loss" in row.fault and not row.counted for row in find_rows("power LOSS"))
    assert main(["--only", "no such fault"]) == 2
