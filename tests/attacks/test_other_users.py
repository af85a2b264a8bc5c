"""Another user of the same host: sees every name in /dev/shm and /tmp, and can make names there first."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import holdfast
from holdfast.checkpoint.shared_memory import Arena, create_file, find_files, read_private, unlink_file
from holdfast.writer.arena_card import card_path
from tests.users import NOBODY, as_user, require_root, run_as_user, shared_folder

VICTIM = 54321
MEMORY = Path("/dev/shm")


def make_foreign(path: Path) -> None:
    path.touch(mode=0o644)
    os.chown(path, NOBODY, NOBODY)


@contextmanager
def attacker(endings: tuple[str, ...]) -> Iterator[list[Path]]:
    """Plants files of another user beside every arena of the victim, as soon as it appears."""
    planted: list[Path] = []
    over = threading.Event()

    def plant() -> None:
        while not over.wait(0.001):
            for arena in MEMORY.glob("holdfast-*"):
                if arena.suffix or arena in planted or not _is_of(arena, VICTIM):
                    continue
                planted.append(arena)
                for ending in endings:
                    make_foreign(Path(f"{arena}{ending}"))

    thread = threading.Thread(target=plant)
    thread.start()
    try:
        yield planted
    finally:
        over.set()
        thread.join()
        for arena in planted:
            for ending in endings:
                Path(f"{arena}{ending}").unlink(missing_ok=True)


def _is_of(path: Path, user: int) -> bool:
    try:
        return path.lstat().st_uid == user
    except FileNotFoundError:
        return False


TRAIN = """
import pathlib, sys, warnings
import torch
import holdfast

warnings.simplefilter("error")
with holdfast.Checkpointer(sys.argv[1]) as checkpointer:
    for step in (1, 2, 3):
        checkpointer.save(step, {"w": torch.full((3,), float(step))}).result(60)
    assert [path for path in pathlib.Path("/dev/shm").glob("holdfast-*.card") if path.lstat().st_uid == 65534]
state = {"w": torch.zeros(3)}
with holdfast.Checkpointer(sys.argv[1]) as checkpointer:
    print(checkpointer.restore(state), state["w"].tolist())
"""


@pytest.mark.full
def test_saves_go_on_though_another_user_takes_the_names_beside_an_arena() -> None:
    require_root()
    with shared_folder() as folder, attacker((".card", ".mail")) as planted:
        assert run_as_user(VICTIM, TRAIN, folder / "run") == "3 [3.0, 3.0, 3.0]"
        assert planted and not [path for path in MEMORY.glob("holdfast-*") if _is_of(path, VICTIM)]


def test_a_file_of_another_user_is_left_where_it_is() -> None:
    require_root()
    with shared_folder() as folder:
        make_foreign(folder / "card")
        assert as_user(VICTIM, lambda: unlink_file(str(folder / "card"))) == "None"
        assert (folder / "card").exists()


def test_an_own_file_that_cannot_be_deleted_is_an_error() -> None:
    require_root()
    with shared_folder() as folder:
        closed = folder / "closed"
        closed.mkdir()
        (closed / "arena").touch()
        os.chown(closed / "arena", VICTIM, VICTIM)
        assert "Permission denied" in as_user(VICTIM, lambda: unlink_file(str(closed / "arena")))


def test_memory_with_a_second_name_is_not_used() -> None:
    """A hard link that another user made to a private file of this user gives that file a name of their choice."""
    path = Path(create_file(4096, "test-users-"))
    alias = path.with_name(f"holdfast-test-users-alias-{os.getpid()}")
    os.link(path, alias)
    try:
        assert find_files("test-users-") == []
        with pytest.raises(holdfast.StorageError, match="was not created by Holdfast"):
            Arena(str(alias), 4096)
        with pytest.raises(holdfast.StorageError, match="not a file that Holdfast created"):
            read_private(str(alias), 10_000)
        alias.unlink()
        assert find_files("test-users-") == [path]
        Arena(str(path), 4096).close()
    finally:
        alias.unlink(missing_ok=True)
        unlink_file(str(path))


def test_an_arena_or_card_of_another_user_is_not_found() -> None:
    require_root()
    path = create_file(4096, "test-users-")
    try:
        assert as_user(VICTIM, lambda: find_files("test-users-")) == "[]"
        for taken in (path, card_path(path)):
            make_foreign(Path(taken))
        os.chmod(path, 0o600)
        assert find_files("test-users-") == []
        with pytest.raises(holdfast.StorageError, match="was not created by Holdfast"):
            Arena(path, 4096)
        with pytest.raises(holdfast.StorageError, match="not a file that Holdfast created"):
            read_private(card_path(path), 4096)
    finally:
        for taken in (path, card_path(path)):
            unlink_file(taken)
