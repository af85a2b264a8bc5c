"""Cleanup at the start of a run: earlier writers are awaited, and only what no process holds is deleted."""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.shared_memory import Arena, create_file, find_files, unlink_file
from holdfast.core.errors import PeerFailed
from holdfast.storage import linux
from holdfast.storage.local import LocalStorage
from holdfast.testing.watched import WatchedSharedStorage
from holdfast.writer import startup_cleanup
from holdfast.writer.arena_card import arena_prefix, pid_namespace
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import Outcome, WriterStatus
from holdfast.writer.startup_cleanup import clean_arenas, clean_storage, dead_attempts, holders, wait_for_writers
from tests.writer.conftest import RUN
from tests.writer.gates import Count
from tests.writer.two_hosts import ATTEMPT


def test_a_held_mailbox_keeps_its_attempt(tmp_path: Path, mailbox: Mailbox) -> None:
    storage = LocalStorage(tmp_path)
    storage.begin(ATTEMPT)
    hold = storage.hold(mailbox.folder)
    assert clean_storage(storage, {mailbox.folder}) == [] and (tmp_path / ATTEMPT).is_dir()
    hold.release()
    assert clean_storage(storage, {mailbox.folder}) == [ATTEMPT]
    assert not (tmp_path / ATTEMPT).exists() and not (tmp_path / mailbox.folder).exists()


def test_arenas_of_dead_trainers_are_deleted_but_for_those_to_keep() -> None:
    paths = [create_file(4096, f"{RUN}-{rank}-{2**22}-1-{pid_namespace()}-", in_memory=True) for rank in (0, 1)]
    assert clean_arenas(RUN, keep=lambda path: path == paths[0]) == [None]
    assert [str(path) for path in find_files(RUN)] == paths[:1]
    assert clean_arenas(RUN) == [None] and find_files(RUN) == []


def test_arenas_of_living_trainers_are_kept_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first save of a run asks for every arena of its host."""
    path = create_file(4096, arena_prefix(RUN, 0), in_memory=True)
    arena = Arena(path, 4096, hold=True, owner=True)
    monkeypatch.setattr(linux, "_LOCK_TRIES", 10**6)
    assert clean_arenas(RUN) == [] and [str(path) for path in find_files(RUN)] == [path]
    arena.close()
    assert clean_arenas(RUN) == [], "its trainer lives"
    unlink_file(path)


def test_the_error_names_the_writers_processes_and_no_others(
    tmp_path: Path, orphan: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_cleanup, "_WARN_S", 0.1)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(PeerFailed) as raised:
        warnings.simplefilter("always")
        wait_for_writers(LocalStorage(tmp_path), RUN, 0.5, 60.0, look_at_storage=False)
    for text in (str(raised.value), str(caught[0].message)):
        assert f"`kill -9 {orphan[1]}`" in text and "pkill" not in text
        assert str(os.getpid()) not in re.findall(r"\d+", text.partition("kill -9")[2])


def test_writers_of_another_host_are_named_by_their_host(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    mailbox.post_status(0, WriterStatus(1))
    with pytest.raises(PeerFailed, match="host north; wait for them, or end them there"):
        wait_for_writers(LocalStorage(tmp_path), RUN, 0.3, 60.0, look_at_storage=True)


def test_writers_of_other_hosts_are_left_to_the_rank_that_looks_at_the_storage(
    tmp_path: Path, mailbox: Mailbox
) -> None:
    mailbox.post_host("north")
    mailbox.post_status(0, WriterStatus(1))
    assert wait_for_writers(LocalStorage(tmp_path), RUN, 0.3, 60.0, look_at_storage=False) == set()


def test_writers_are_awaited_without_haste(tmp_path: Path, mailbox: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_cleanup, "_POLL_S", 0.1)
    mailbox.post_host("north")
    gate, began = Count(), time.monotonic()
    with pytest.raises(PeerFailed, match="still at work"):
        wait_for_writers(WatchedSharedStorage(LocalStorage(tmp_path), gate), RUN, 0.2, 60.0, look_at_storage=True)
    assert gate.calls["hidden"] <= (time.monotonic() - began) / 0.1 + 1


def test_an_attempt_with_an_outcome_is_dead_even_if_its_status_changes(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    mailbox.post_status(0, WriterStatus(1))
    mailbox.post_outcome(Outcome())
    assert dead_attempts(LocalStorage(tmp_path), 60.0) == {mailbox.folder}


def test_an_attempt_without_a_mailbox_is_dead(tmp_path: Path) -> None:
    (tmp_path / ATTEMPT).mkdir()
    (tmp_path / ".attempt-of-somebody-else").mkdir()
    assert dead_attempts(LocalStorage(tmp_path), 60.0) == {ATTEMPT}


def test_who_holds_a_file_is_found_by_the_file(tmp_path: Path, orphan: tuple[str, int]) -> None:
    assert holders([Path(orphan[0])]) == [orphan[1]]
    assert holders([tmp_path, tmp_path / "absent"]) == []


def test_a_process_whose_files_may_not_be_listed_is_not_named(
    orphan: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, who may list the files of every process, this takes a kernel that refuses."""
    listed = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if path == f"/proc/{orphan[1]}/fd":
            raise PermissionError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert holders([Path(orphan[0])]) == []
