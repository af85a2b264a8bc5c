"""What a run leaves in the memory of its host: whose it is, where it is said, and how it goes."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.checkpoint.run_identity import older_run_id, run_id
from holdfast.checkpoint.shared_memory import create_file, find_files, unlink_file
from holdfast.engine.options import SILENCE_S
from holdfast.storage.identity import IDENTITY
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_card import card_path
from tests.cli.calls import call
from tests.dist.harness import run_ranks


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((50_000,), float(value))}


def arenas(root: Path) -> list[Path]:
    return [path for path in find_files(run_id(LocalStorage(root))) if path.suffix != ".card"]


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(warning.message) for warning in caught]


def block(root: Path, step: int) -> Path:
    """Make a step impossible to write; returns what is in its way."""
    thesis = root / f"step-{step:012d}"
    thesis.mkdir(parents=True)
    (thesis / "thesis.txt").write_text("years of work")
    return thesis


def leave_in_memory(root: Path, step: int) -> None:
    thesis = block(root, step)
    with heard(), holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(step, state(step)).wait(60)
    shutil.rmtree(thesis)
    assert len(arenas(root)) == 1


def restored(root: Path) -> tuple[int | None, float]:
    live = state(0.0)
    with heard(), holdfast.Checkpointer(root) as checkpointer:
        found = checkpointer.restore(live)
    return found, live["w"][0].item()


# Whose memory it is.


def test_a_root_that_was_deleted_and_made_again_does_not_get_the_dead_runs_weights(tmp_path: Path) -> None:
    root = tmp_path / "run"
    leave_in_memory(root, 9)
    left = arenas(root)
    shutil.rmtree(root)
    root.mkdir()
    assert restored(root) == (None, 0.0)
    for path in left:
        assert path.exists(), "it is not this root's to delete"
        unlink_file(str(path))
        unlink_file(card_path(str(path)))


@pytest.mark.full
@pytest.mark.parametrize("how", ["copied", "restored from a backup"])
def test_a_copy_of_a_root_is_another_root(tmp_path: Path, how: str) -> None:
    root, copy = tmp_path / "run", tmp_path / "copy"
    with holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
    shutil.copytree(root, copy)
    leave_in_memory(root, 9)
    left = arenas(root)
    if how == "restored from a backup":
        shutil.rmtree(root)
        copy = Path(shutil.copytree(copy, root))
    assert restored(copy) == (1, 1.0)
    assert all(path.exists() for path in left)
    for path in left:
        unlink_file(str(path))
        unlink_file(card_path(str(path)))


def test_a_root_that_was_moved_is_the_same_root(tmp_path: Path) -> None:
    leave_in_memory(tmp_path / "run", 9)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert restored(tmp_path / "moved") == (9, 9.0)
    assert arenas(tmp_path / "moved") == []


def test_a_root_of_an_older_version_gets_an_identity_and_its_memory_is_named_not_taken(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
    (tmp_path / IDENTITY).unlink()
    older = create_file(4096, f"{older_run_id(LocalStorage(tmp_path))}-0-1-1-", in_memory=True)
    try:
        with heard() as texts, holdfast.Checkpointer(tmp_path) as checkpointer:
            assert checkpointer.restore(state(0)) == 1
        assert (tmp_path / IDENTITY).exists() and Path(older).exists()
        assert any(older in text and f"rm {older}" in text for text in texts)
    finally:
        unlink_file(older)


def test_an_identity_is_made_by_who_saves_and_not_by_who_looks(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path / "absent") as checkpointer:
        assert checkpointer.restore({"note": 1}) is None
    assert not (tmp_path / "absent").exists()
    holdfast.save(tmp_path / "one", state(1))
    assert os.listdir(tmp_path) == ["one"]
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state(1)).result(60)
    assert sorted(os.listdir(tmp_path / "run")) == [IDENTITY, "step-000000000001"]
    for command in (["ls"], ["top"], ["gc"], ["verify"]):
        assert call(*command, tmp_path / "run").exit_code in (0, 2) or command == ["verify"]


# What is said of it, and how it goes.


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A root on a disk of its own that has room for one step and not for two."""
    command = ["mount", "-t", "tmpfs", "-o", "size=340k", "tmpfs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    yield tmp_path / "run"
    for path in find_files(run_id(LocalStorage(tmp_path / "run"))):
        unlink_file(str(path))
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def remount(root: Path, option: str) -> None:
    for _ in range(50):
        gc.collect()  # pins of folders that are gone keep a disk busy
        command = ["mount", "-o", f"remount,{option}", str(root.parent)]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return
        time.sleep(0.1)  # a writer that has just ended may still have a file open
    raise AssertionError("the disk stays busy")


def test_what_a_full_disk_leaves_in_memory_is_named_and_can_be_freed(small: Path) -> None:
    with heard() as texts:
        checkpointer = holdfast.Checkpointer(small)
        checkpointer.save(1, state(1)).result(60)
        for step in (2, 3, 4):
            handle = checkpointer.save(step, state(step))
            assert handle.wait(60) and isinstance(handle.error, holdfast.StorageError)
            assert len(arenas(small)) == 1, "failures do not add up"
        (kept,) = arenas(small)
        assert f"{kept}, {kept.stat().st_size} bytes" in str(handle.error)
        checkpointer.steps()
        checkpointer._warnings.emit()  # as any later call does
        checkpointer.close()
    assert sum("step 4 was not saved" in text for text in texts) == 1
    assert kept.exists() and Path(card_path(str(kept))).exists()
    said = texts[-1]
    assert f"{kept}, {kept.stat().st_size} bytes" in said and str(small) in said
    assert f"rm {kept} {kept}.card" in said and f"holdfast gc {small} --memory" in said
    listed = call("gc", small, "--json").output
    assert str(kept) in listed and "--memory deletes it" in listed and kept.exists()
    assert str(kept) in call("gc", small, "--memory").output
    assert arenas(small) == [] and not Path(card_path(str(kept))).exists()


@pytest.mark.full
def test_what_a_read_only_disk_leaves_in_memory_is_restored_once_it_can_be_written(small: Path) -> None:
    with heard() as texts, holdfast.Checkpointer(small) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        remount(small, "ro")
        assert checkpointer.save(2, {"w": torch.full((3,), 2.0)}).wait(60)
    (kept,) = arenas(small)
    assert any(f"rm {kept}" in text for text in texts)
    live = {"w": torch.zeros(3)}
    with heard(), holdfast.Checkpointer(small) as checkpointer:
        assert checkpointer.restore(live) == 2, "reading needs no writing"
    assert arenas(small) == [kept], "it was not written yet"
    remount(small, "rw")
    with heard(), holdfast.Checkpointer(small) as checkpointer:
        assert checkpointer.restore(live) == 2 and live["w"].tolist() == [2.0] * 3
    assert arenas(small) == [] and holdfast.open(small / "step-000000000002").verify().good


def save_before_and_after_it_is_read_only(root: str) -> str:
    with heard(), holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
        dist.barrier()
        if dist.get_rank() == 0:
            remount(Path(root), "ro")
        dist.barrier()
        handle = checkpointer.save(2, state(2))
        assert handle.wait(100)
        dist.barrier()
        if dist.get_rank() == 0:
            remount(Path(root), "rw")
        dist.barrier()
    return str(handle.error)


@pytest.mark.full
def test_every_rank_learns_soon_that_nothing_can_be_created(small: Path) -> None:
    """The writers cannot tell each other: there is no place for their notes."""
    started = time.monotonic()
    for error in run_ranks(2, save_before_and_after_it_is_read_only, str(small), deadline_s=100):
        assert "Read-only file system" in error
    assert time.monotonic() - started < SILENCE_S, "no rank waited for another to be silent"
    assert restored(small) == (2, 2.0), "it was kept in memory"


@pytest.mark.full
def test_a_root_without_an_identity_leaves_nothing_in_memory(small: Path) -> None:
    """No later start could tell that it is this root's."""
    holdfast.save(small / "step-000000000001", {"w": torch.ones(3)}, step=1)
    remount(small, "ro")
    before = set(find_files(""))
    live = {"w": torch.zeros(3)}
    with heard() as texts, holdfast.Checkpointer(small) as checkpointer:
        assert checkpointer.restore(live) == 1
        assert checkpointer.save(2, live).wait(60)
    assert any("Read-only file system" in text for text in texts)
    assert not any("stays in" in text for text in texts)
    assert {path for path in set(find_files("")) - before if f"-{os.getpid()}-" in path.name} == set()


def test_a_process_that_ends_without_closing_leaves_no_arena(tmp_path: Path) -> None:
    code = (
        "import torch, holdfast, sys\nck = holdfast.Checkpointer(sys.argv[1])\nck.save(1, {'w': torch.ones(50_000)})\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert restored(tmp_path)[0] == 1
    assert find_files(run_id(LocalStorage(tmp_path))) == []


@pytest.mark.full
def test_starts_that_cannot_write_do_not_add_up_in_memory(small: Path) -> None:
    """Each restores from memory and tries to write what it restored; each is killed before it can close."""
    leave_in_memory(small, 2)
    first = arenas(small)
    remount(small, "ro")
    code = (
        "import os, sys, torch, warnings, holdfast\n"
        "warnings.simplefilter('ignore')\n"
        "ck = holdfast.Checkpointer(sys.argv[1])\n"
        "assert ck.restore({'w': torch.zeros(50_000)}) == 2\n"
        "ck._engine._memory._written.wait(60); ck._engine.background.writer.kill(); os._exit(9)\n"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", code, str(small)], check=False, timeout=120).returncode == 9
        assert len(arenas(small)) <= 2
    remount(small, "rw")
    assert restored(small) == (2, 2.0) and arenas(small) == []
    assert first


@pytest.mark.parametrize("on_busy", ["skip", "wait"])
def test_a_save_right_after_a_restore_from_memory_descends_from_it(tmp_path: Path, on_busy: str) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step)).result(60)
    leave_in_memory(tmp_path, 3)
    live = state(0)
    events: list[holdfast.Event] = []
    keep = holdfast.keep.last(2)
    with heard(), holdfast.Checkpointer(tmp_path, on_busy=on_busy, keep=keep, on_event=events.append) as checkpointer:
        assert checkpointer.restore(live) == 3 and live["w"][0] == 3.0
        first = checkpointer.save(4, live)
        assert first.wait(60) and (first.error is None or first.skipped)
        assert checkpointer.finish(60) and checkpointer.steps()[0] > 1, "the run's policy applies to it"
        last = checkpointer.save(5, live).result(60)
        assert last.manifest.parent == (3 if first.skipped else 4)
    assert [event.detail for event in events if event.name == "published" and event.step == 3] == ["from memory"]
    assert arenas(tmp_path) == [] and all(holdfast.open(path).verify().good for path in tmp_path.glob("step-*"))


def test_a_step_that_only_memory_holds_is_not_found_by_its_number(tmp_path: Path) -> None:
    leave_in_memory(tmp_path, 3)
    with heard(), holdfast.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(holdfast.NotFound, match="the memory of this host holds it: restore without a step"):
            checkpointer.restore(state(0), step=3)
        with pytest.raises(holdfast.NotFound, match=r"no checkpoint of step 4$"):
            checkpointer.restore(state(0), step=4)
        assert checkpointer.restore(state(0)) == 3


def test_a_run_that_saves_without_restoring_says_what_it_discards(tmp_path: Path) -> None:
    leave_in_memory(tmp_path, 3)
    with heard() as texts, holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
    assert any("step 3, which an earlier start had captured" in text for text in texts) and arenas(tmp_path) == []


def test_two_restores_in_a_row_from_memory(tmp_path: Path) -> None:
    leave_in_memory(tmp_path, 3)
    with heard(), holdfast.Checkpointer(tmp_path) as checkpointer:
        for _ in range(2):
            live = state(0)
            assert checkpointer.restore(live) == 3 and live["w"][0] == 3.0
    assert arenas(tmp_path) == [] and holdfast.open(tmp_path / "step-000000000003").verify().good


@pytest.mark.full
def test_a_run_that_is_killed_right_after_a_restore_from_memory_loses_nothing(tmp_path: Path) -> None:
    leave_in_memory(tmp_path, 3)
    code = (
        "import os, sys, torch, warnings, holdfast\n"
        "warnings.simplefilter('ignore')\n"
        "ck = holdfast.Checkpointer(sys.argv[1])\n"
        "assert ck.restore({'w': torch.zeros(50_000)}) == 3\n"
        "os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=120).returncode == 9
    assert restored(tmp_path) == (3, 3.0)
    assert arenas(tmp_path) == [] and holdfast.open(tmp_path / "step-000000000003").verify().good


def test_memory_that_does_not_fit_the_model_says_how_to_give_it_up(tmp_path: Path) -> None:
    root = tmp_path / "root"
    leave_in_memory(root, 2)
    with holdfast.Checkpointer(root) as checkpointer:
        text = r"in the memory of this host(.|\n)*holdfast gc \S+ --memory"
        with pytest.raises(holdfast.Mismatch, match=text) as error:
            checkpointer.restore({"w": torch.zeros(3)})
        assert "the shape differs" in str(error.value)
    assert len(arenas(root)) == 1  # nobody gave it up yet
    call("gc", str(root), "--memory")
    assert not arenas(root)
