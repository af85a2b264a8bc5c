"""The commit: every byte reported, nothing of a user's replaced, nothing published that may not be on the disk."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.attempt import check_replaceable
from holdfast.checkpoint.commit import BlockReport, FileFacts, file_records, small_file_record
from holdfast.core.errors import StorageError
from holdfast.format.dtypes import dtype_named
from holdfast.plan.files import TensorSpec, split_group
from holdfast.storage.local import LocalStorage

FILES = split_group("model", [TensorSpec("w", dtype_named("uint8"), (1000,))], 1 << 30)
NAME, SIZE = FILES[0].name, FILES[0].size


def report(offset: int, size: int) -> BlockReport:
    return BlockReport(NAME, offset, size, "0" * 32)


def test_blocks_are_recorded_in_order_with_the_header() -> None:
    record = file_records([FileFacts.of(file) for file in FILES], [report(600, SIZE - 600), report(0, 600)])[NAME]
    assert [block.offset for block in record.blocks] == [0, 600]
    assert record.header is not None and record.header.size == len(FILES[0].header)


@pytest.mark.parametrize(
    "reports", [[], [report(0, 600)], [report(600, SIZE - 600)], [report(0, 600), report(601, SIZE - 601)]]
)
def test_bytes_that_nobody_reported_stop_the_commit(reports: list[BlockReport]) -> None:
    with pytest.raises(StorageError, match="reported"):
        file_records([FileFacts.of(file) for file in FILES], reports)


def test_small_files_are_cut_like_large_ones() -> None:
    record = small_file_record(b"x" * 10_000, 4096)
    assert [(block.offset, block.size) for block in record.blocks] == [(0, 4096), (4096, 4096), (8192, 1808)]
    assert small_file_record(b"", 4096).blocks == ()


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
