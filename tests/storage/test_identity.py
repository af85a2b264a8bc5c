"""The identity of a root: one, for all who race; durable; of the file, not of its contents alone."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import StorageError
from holdfast.storage.base import IdentifiedStorage
from holdfast.storage.identity import IDENTITY, id_in, make_identity, new_identity, read_identity
from holdfast.storage.local import LocalStorage
from holdfast.testing.disk import recorded
from holdfast.testing.powerloss import judge_all


def test_it_is_made_once_and_read_afterwards(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    assert isinstance(storage, IdentifiedStorage)
    assert storage.identity(make=False) is None and not storage.exists()
    made = storage.identity(make=True)
    assert made is not None and made == storage.identity(make=False) == storage.identity(make=True)
    assert (tmp_path / "run" / IDENTITY).stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "run") == [IDENTITY] and storage.folders() == storage.hidden() == []


def test_of_many_who_race_one_makes_it(tmp_path: Path) -> None:
    for number in range(20):
        root = tmp_path / str(number)
        root.mkdir()
        if number % 2:
            (root / IDENTITY).write_bytes(b"")
        with ThreadPoolExecutor(8) as pool:
            found = set(pool.map(lambda _, root=root: make_identity(root), range(8)))
        assert len(found) == 1 and found == {read_identity(root)}
        assert os.listdir(root) == [IDENTITY]


@pytest.mark.parametrize(
    "data",
    [b"", bytes(50), b'{"id": "0123', b"\xff\xfe", b"[]", b"17", b'{"id": 3}', b'{"id": "../../x"}', b"[" * 9000],
)
def test_one_that_cannot_be_read_is_made_anew(tmp_path: Path, data: bytes) -> None:
    (tmp_path / IDENTITY).write_bytes(data)
    assert read_identity(tmp_path) is None
    made = make_identity(tmp_path)
    assert made is not None and made == read_identity(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_replaced_and_never_followed(tmp_path: Path, kind: str) -> None:
    (tmp_path / "other").write_bytes(new_identity())
    if kind == "link":
        (tmp_path / IDENTITY).symlink_to(tmp_path / "other")
    else:
        os.mkfifo(tmp_path / IDENTITY)
    assert read_identity(tmp_path) is None
    made = make_identity(tmp_path)
    assert made is not None and made.id != id_in((tmp_path / "other").read_bytes())


def test_a_folder_in_its_place_is_an_error_of_the_storage(tmp_path: Path) -> None:
    (tmp_path / IDENTITY / "x").mkdir(parents=True)
    with pytest.raises(StorageError):
        LocalStorage(tmp_path).identity(make=True)


def test_a_copy_has_the_same_id_in_another_place(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    made = make_identity(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = read_identity(tmp_path / "b")
    assert made is not None and copied is not None and made.id == copied.id and made.place != copied.place
    (tmp_path / "a").rename(tmp_path / "c")
    assert read_identity(tmp_path / "c") == made


def test_a_copy_that_got_the_inode_of_the_deleted_original_is_in_another_place(tmp_path: Path) -> None:
    first = make_identity(tmp_path)
    assert first is not None
    data = (tmp_path / IDENTITY).read_bytes()
    for _ in range(20):
        (tmp_path / IDENTITY).unlink()
        time.sleep(0.02)  # file systems take their times from a clock that ticks every few milliseconds
        (tmp_path / IDENTITY).write_bytes(data)
        copy = read_identity(tmp_path)
        assert copy is not None and copy.id == first.id and copy.place != first.place


def test_permissions_and_times_that_change_leave_the_place(tmp_path: Path) -> None:
    first = make_identity(tmp_path)
    (tmp_path / IDENTITY).chmod(0o644)
    os.utime(tmp_path / IDENTITY, (1, 1))
    assert read_identity(tmp_path) == first


def test_a_file_system_without_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert make_identity(tmp_path) == read_identity(tmp_path) is not None


def test_once_it_was_told_no_power_loss_takes_it(tmp_path: Path) -> None:
    def judge(root: Path, told: Sequence[Any]) -> str:
        found = read_identity(root)
        if told and (found is None or found.id != told[0].id):
            return f"lost: {found}"
        return "" if LocalStorage(root).identity(make=True) is not None else "stuck"

    with recorded(tmp_path) as recording:
        recording.mark(LocalStorage(tmp_path / "run").identity(make=True))
    outcome = judge_all(recording, judge, root="run")
    assert outcome.states > 5 and outcome.bad == []
