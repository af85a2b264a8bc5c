"""Links of the Hugging Face cache: to a blob, or not followed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.storage.local_files import blob_size, blob_target

DIGEST = "ab" * 20


@pytest.fixture
def snapshot(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    folder = tmp_path / "snapshots" / "x"
    folder.mkdir(parents=True)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / DIGEST).write_bytes(b"data")
    descriptor = os.open(folder, os.O_RDONLY)
    yield folder, descriptor
    os.close(descriptor)


def test_a_link_to_a_blob(snapshot: tuple[Path, int]) -> None:
    folder, descriptor = snapshot
    (folder / "f").symlink_to(f"../../blobs/{DIGEST}")
    assert blob_target("f", descriptor) == f"../../blobs/{DIGEST}" and blob_size("f", descriptor) == 4


@pytest.mark.parametrize("target", ["/etc/passwd", "../../blobs/../x", f"../{DIGEST}", "../../blobs/short", "f"])
def test_other_links_are_none(snapshot: tuple[Path, int], target: str) -> None:
    folder, descriptor = snapshot
    (folder / "f").symlink_to(target)
    assert blob_target("f", descriptor) is None and blob_size("f", descriptor) is None


def test_what_is_no_link_and_a_blob_that_is_gone(snapshot: tuple[Path, int]) -> None:
    folder, descriptor = snapshot
    (folder / "f").write_bytes(b"")
    (folder / "g").symlink_to("../../blobs/" + "cd" * 20)
    assert blob_target("f", descriptor) is None and blob_target("none", descriptor) is None
    assert blob_size("g", descriptor) is None
