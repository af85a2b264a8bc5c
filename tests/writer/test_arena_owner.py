"""Arenas by name: which trainer owns one, and whether that trainer is alive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import Arena, create_file, find_files, has_owner, unlink_file
from holdfast.storage.local import LocalStorage
from holdfast.writer import arena_owner
from holdfast.writer.arena_owner import ArenaFile, Process, arena_prefix, began, find_arenas, pid_namespace, trainers
from holdfast.writer.startup_cleanup import clean_arenas
from tests.writer.conftest import RUN


def test_an_arena_names_the_process_that_creates_it() -> None:
    path = create_file(4096, arena_prefix(RUN, 3), in_memory=True)
    try:
        (arena,) = find_arenas(RUN)
        assert (arena.trainer, arena.began) == (Process.current(), began(os.getpid()))
        assert arena.trainer_lives() and not arena.is_orphan()
        assert ArenaFile.at(Path(f"{path}.card")) is None
    finally:
        unlink_file(path)


def test_a_later_process_with_the_same_pid_is_not_the_trainer() -> None:
    path = create_file(4096, f"{RUN}-0-{os.getpid()}-{began(os.getpid()) + 1}-{pid_namespace()}-", in_memory=True)
    try:
        assert trainers(RUN) == set()
    finally:
        unlink_file(path)


def test_an_orphan_is_held_by_a_writer_whose_trainer_is_dead(orphan: tuple[str, int]) -> None:
    (arena,) = find_arenas(RUN)
    assert arena.is_orphan() and clean_arenas(RUN) == 0


@pytest.mark.parametrize("alive", [True, False])
def test_a_trainer_of_another_namespace_is_judged_by_its_lock(alive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid says nothing here: the process with that pid is this one, or none."""
    elsewhere = pid_namespace() + 1
    path = create_file(4096, f"{RUN}-0-{os.getpid()}-{began(os.getpid())}-{elsewhere}-", in_memory=True)
    memory = Arena(path, 4096, hold=True, owner=alive)
    arena = ArenaFile.at(Path(path))
    assert arena is not None
    try:
        assert has_owner(path) == alive
        assert arena.is_orphan() == (not alive)
        assert trainers(RUN) == ({Process(os.getpid(), elsewhere)} if alive else set())
        assert "of another container" in str(Process(os.getpid(), elsewhere))
        memory.close()
        assert not arena.is_orphan()
        assert clean_arenas(RUN) == 0, "it may just be about to be held"
        monkeypatch.setattr(arena_owner, "_NEW_S", 0.0)
        assert clean_arenas(RUN) == 1 and not find_files(RUN)
    finally:
        unlink_file(path)


def test_an_arena_without_a_key_matches_nothing(tmp_path: Path) -> None:
    """A root without an identity never sees, or removes, what others have in memory."""
    assert find_files(run_id(LocalStorage(tmp_path))) == []
    assert run_id(LocalStorage(tmp_path)) != run_id(LocalStorage(tmp_path))
