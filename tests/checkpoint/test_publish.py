"""Publishing: nothing of a user's is replaced, and nothing that may not be on the disk is published."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.publish import check_replaceable
from holdfast.core.errors import StorageError
from holdfast.storage.local import LocalStorage


def test_a_folder_of_other_files_is_not_ours_to_replace(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    check_replaceable(storage, "absent")
    (tmp_path / "empty").mkdir()
    check_replaceable(storage, "empty")
    (tmp_path / "empty" / "mine").write_text("x")
    with pytest.raises(StorageError, match="mine"):
        check_replaceable(storage, "empty")


def test_a_failed_fsync_is_not_tried_again_and_the_attempt_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the kernel may call the lost pages clean: a second one would succeed and mean nothing."""
    fsync = os.fsync
    holdfast.save(tmp_path / "good", {"w": torch.ones(3), "note": 1})
    number = failures = 0
    while failures == number:
        number += 1
        files: list[int] = []

        def fail(descriptor: int, number: int = number, files: list[int] = files) -> None:
            state = os.fstat(descriptor)
            if stat.S_ISREG(state.st_mode):
                assert state.st_ino not in files[number - 1 : number], "the file that failed is synced again"
                files.append(state.st_ino)
                if len(files) == number:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", fail)
        try:
            holdfast.save(tmp_path / "new", {"w": torch.ones(3), "note": 2})
        except StorageError as error:
            failures += 1
            assert "Input/output error" in str(error) and not (tmp_path / "new").exists()
        monkeypatch.undo()
        assert holdfast.open(tmp_path / "good").verify().good
    assert failures >= 3, "tensors, values and the manifest are synced"
    assert holdfast.open(tmp_path / "new").verify().good
