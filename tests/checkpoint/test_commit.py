"""The commit: every byte reported, small files cut like large ones."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.commit import BlockReport, FileFacts, file_records, small_file_record
from holdfast.core.errors import StorageError
from holdfast.format.dtypes import dtype_named
from holdfast.plan.files import TensorSpec, split_group

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
