"""Publishing: every byte reported, and nothing of a user's is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.core.errors import StorageError
from holdfast.format.dtypes import dtype_named
from holdfast.persist.publish import check_replaceable, file_records, small_file_record
from holdfast.persist.write import BlockReport
from holdfast.plan.files import TensorSpec, split_group
from holdfast.storage.local import LocalStorage

FILES = split_group("model", [TensorSpec("w", dtype_named("uint8"), (1000,))], 1 << 30)
NAME, SIZE = FILES[0].name, FILES[0].size


def report(offset: int, size: int) -> BlockReport:
    return BlockReport(NAME, offset, size, "0" * 32)


def test_blocks_are_recorded_in_order_with_the_header() -> None:
    record = file_records(FILES, [report(600, SIZE - 600), report(0, 600)])[NAME]
    assert [block.offset for block in record.blocks] == [0, 600]
    assert record.header is not None and record.header.size == len(FILES[0].header)


@pytest.mark.parametrize(
    "reports", [[], [report(0, 600)], [report(600, SIZE - 600)], [report(0, 600), report(601, SIZE - 601)]]
)
def test_bytes_that_nobody_reported_stop_the_commit(reports: list[BlockReport]) -> None:
    with pytest.raises(StorageError, match="reported"):
        file_records(FILES, reports)


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
