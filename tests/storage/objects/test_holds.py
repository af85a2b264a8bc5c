"""Holds of object stores: locks in a folder of this host that no other user can take or open."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.errors import StorageError
from holdfast.storage import private
from holdfast.storage.objects.holds import HostHolds
from tests.users import NOBODY, as_user, require_root, shared_folder

PREFIX = f"holdfast-holds-{os.getuid()}"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty place in memory for the folder of locks, open to every user as /dev/shm is."""
    with shared_folder() as folder:
        monkeypatch.setattr(private, "places", lambda: [folder])
        yield folder


def own(memory: Path) -> list[Path]:
    return [path for path in sorted(memory.iterdir()) if path.lstat().st_uid == os.getuid() and path.is_dir()]


def check_works() -> None:
    """A hold is seen by others of the same user, keeps the folder from being removed, and ends."""
    ours, theirs = HostHolds("s3://bucket/run"), HostHolds("s3://bucket/run")
    assert not theirs.is_held("step-1")
    hold = ours.take("step-1")
    assert theirs.is_held("step-1") and not theirs.is_held("step-2")
    with theirs.exclusive("step-1") as is_free:
        assert not is_free
    hold.release()
    with theirs.exclusive("step-1") as is_free:
        assert is_free


def test_the_folder_of_locks_is_private_and_used_again(memory: Path) -> None:
    check_works()
    check_works()
    (folder,) = own(memory)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


def test_a_umask_does_not_change_its_mode(memory: Path) -> None:
    before = os.umask(0o277)
    try:
        HostHolds("s3://bucket/run").take("step-1").release()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in own(memory)] == [0o700]


def by_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def by_private_folder(path: Path) -> None:
    path.mkdir(mode=0o700)


def by_file(path: Path) -> None:
    path.write_bytes(b"")


def by_link(path: Path) -> None:
    path.symlink_to("/")


def by_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [by_folder, by_private_folder, by_file, by_link, by_pipe])
def test_a_name_that_another_user_took_first_stops_nobody(memory: Path, plant) -> None:
    require_root()
    names = [memory / PREFIX, memory / f"{PREFIX}-0", memory / f"{PREFIX}-{'0' * 32}"]
    for name in names:
        assert as_user(NOBODY, partial(plant, name)) == "None"
    check_works()
    assert not {folder.name for folder in own(memory)} & {name.name for name in names}
    assert all(list(name.iterdir()) == [] for name in names if name.is_dir() and not name.is_symlink())


def test_a_link_to_a_folder_of_this_user_is_not_followed(memory: Path, tmp_path: Path) -> None:
    require_root()
    target = tmp_path / "private"
    target.mkdir(mode=0o700)
    as_user(NOBODY, lambda: (memory / f"{PREFIX}-0").symlink_to(target))
    check_works()
    hold = HostHolds("s3://bucket/run").take("step-1")
    assert list(target.iterdir()) == []
    hold.release()


def test_an_own_folder_that_others_may_open_is_not_used(memory: Path) -> None:
    (memory / PREFIX).mkdir()
    (memory / PREFIX).chmod(0o777)
    check_works()
    assert [folder.name != PREFIX for folder in own(memory) if stat.S_IMODE(folder.stat().st_mode) == 0o700] == [True]


def test_locks_in_every_own_folder_count(memory: Path) -> None:
    """An older version, or a process that started at the same instant, has a folder of its own."""
    HostHolds("s3://bucket/run").take("step-1").release()
    (memory / PREFIX).mkdir(mode=0o700)
    check_works()
    assert len(own(memory)) == 2
    hold = HostHolds("s3://bucket/run").take("step-1")
    assert sorted(len(list(folder.iterdir())) for folder in own(memory)) == [1, 1]
    (kept, dropped) = own(memory)
    for file in dropped.iterdir():
        file.unlink()
    assert HostHolds("s3://bucket/run").is_held("step-1")
    hold.release()
    assert list(kept.iterdir()) == []


def test_a_place_where_others_may_rename_our_files_is_refused(memory: Path) -> None:
    memory.chmod(0o777)  # without the sticky bit
    with pytest.raises(StorageError, match=r"sticky bit.*chmod \+t"):
        HostHolds("s3://bucket/run").take("step-1")


def test_descriptors_do_not_leak(memory: Path) -> None:
    check_works()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        check_works()
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, if what another test left was collected
