"""Starting a run: whose writers are waited for, and what is said of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.shared_memory import Arena, create_file, find_files, has_owner, unlink_file
from holdfast.core.errors import PeerFailed
from holdfast.storage.local import LocalStorage
from holdfast.writer import mailbox as mail
from holdfast.writer import startup_cleanup
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.processes import Process, began, holders, pid_space

RUN = "0123456789abcdef" * 2
HOLD = "import sys\nfrom holdfast.checkpoint.shared_memory import Arena\na = Arena(sys.argv[1], 1, hold=True)\nprint('held', flush=True)\nsys.stdin.read()\n"  # noqa: E501


@pytest.fixture
def orphan() -> Iterator[tuple[str, int]]:
    """An arena of a trainer that is dead, held by a writer that is not; with the writer's process."""
    path = create_file(4096, f"{RUN}-0-{2**22}-1-{pid_space()}-", in_memory=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield path, process.pid
    process.communicate(timeout=20)
    unlink_file(path)


def test_the_error_names_the_writers_processes_and_no_others(
    tmp_path: Path, orphan: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_cleanup, "_NOTICE_S", 0.1)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(PeerFailed) as raised:
        warnings.simplefilter("always")
        startup_cleanup.wait_for_writers(LocalStorage(tmp_path), RUN, 0.5, 60.0, look_at_storage=False)
    for text in (str(raised.value), str(caught[0].message)):
        assert f"`kill -9 {orphan[1]}`" in text and "pkill" not in text
        assert str(os.getpid()) not in re.findall(r"\d+", text.partition("kill -9")[2])


def test_writers_of_another_host_are_named_by_their_host(tmp_path: Path) -> None:
    box = Mailbox(LocalStorage(tmp_path), ".attempt-0123456789abcdef")
    box.make()
    box.post(mail.HOST, "north")
    box.post(mail.status(0), {"beat": 1})
    with pytest.raises(PeerFailed, match="host north; wait for them, or end them there"):
        startup_cleanup.wait_for_writers(LocalStorage(tmp_path), RUN, 0.3, 60.0, look_at_storage=True)


def test_who_holds_a_file_is_found_by_the_file(tmp_path: Path, orphan: tuple[str, int]) -> None:
    assert holders([Path(orphan[0])]) == [orphan[1]]
    assert holders([tmp_path, tmp_path / "absent"]) == []


@pytest.mark.parametrize("alive", [True, False])
def test_a_trainer_of_another_namespace_is_judged_by_its_lock(alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process number says nothing here: the process with that number is this one, or none."""
    elsewhere = pid_space() + 1
    path = create_file(4096, f"{RUN}-0-{os.getpid()}-{began(os.getpid())}-{elsewhere}-", in_memory=True)
    arena = Arena(path, 4096, hold=True, owner=alive)
    try:
        assert has_owner(path) == alive
        assert startup_cleanup._is_orphan(Path(path)) == (not alive)
        assert startup_cleanup.trainers(RUN) == ({Process(os.getpid(), elsewhere)} if alive else set())
        assert "of another container" in str(Process(os.getpid(), elsewhere))
        arena.close()
        assert not startup_cleanup._is_orphan(Path(path))
        assert startup_cleanup.clean_arenas(RUN) == 0, "it may just be about to be held"
        monkeypatch.setattr(startup_cleanup, "_YOUNG_S", 0.0)
        assert startup_cleanup.clean_arenas(RUN) == 1 and not find_files(RUN)
    finally:
        unlink_file(path)


def test_an_arena_without_a_key_matches_nothing(tmp_path: Path) -> None:
    """A root without an identity never sees, or removes, what others have in memory."""
    from holdfast.checkpoint.run_identity import run_id

    assert find_files(run_id(LocalStorage(tmp_path))) == []
    assert run_id(LocalStorage(tmp_path)) != run_id(LocalStorage(tmp_path))
