"""Cleanup at the start of a run: only what no process holds is deleted."""

from __future__ import annotations

from pathlib import Path

from holdfast.checkpoint.shared_memory import create_file, find_files
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_owner import pid_namespace
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.startup_cleanup import clean_arenas, clean_storage
from tests.writer.conftest import RUN
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
    assert clean_arenas(RUN, keep=lambda path: path == paths[0]) == 1
    assert [str(path) for path in find_files(RUN)] == paths[:1]
    assert clean_arenas(RUN) == 1 and find_files(RUN) == []
