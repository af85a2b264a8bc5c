"""Sizes that lie: refused, or at least never believed before they are checked."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from attacks.forge import examine, forge_manifest, tensor, tensor_file
from holdfast.core import limits
from holdfast.core.errors import Damaged


def seconds(work: object) -> float:
    started = time.process_time()
    work()  # type: ignore[operator]
    return time.process_time() - started


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder on a file system that holds petabytes, as long as nobody writes them."""
    path = Path(f"/dev/shm/holdfast-test-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


def test_shapes_whose_product_only_a_zero_keeps_small_are_damage(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(tensor_file({"a": tensor(0, 0, [2**62, 2**62, 0])}))
    with pytest.raises(Damaged, match="too large"):
        examine(tmp_path)


def test_a_header_of_many_small_fields_is_refused_at_once(tmp_path: Path) -> None:
    text = b"{" + b",".join(b'"%x":0' % number for number in range(1_500_000)) + b"}"
    (tmp_path / "model.safetensors").write_bytes(tensor_file(text))

    def refused() -> None:
        with pytest.raises(Damaged):
            holdfast.open(tmp_path).keys()

    assert seconds(refused) < 1


def test_a_sparse_file_of_terabytes_opens_at_once(shm: Path) -> None:
    path = shm / "model.safetensors"
    path.write_bytes(tensor_file({"a": tensor(0, 2**46)}))
    os.truncate(path, path.stat().st_size + 2**46)
    assert seconds(lambda: holdfast.open(shm).keys()) < 1


def test_more_files_than_the_limit_are_refused_at_once(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": torch.nn.Linear(4, 3)})
    many = {f"f{number}": {"size": 0, "blocks": []} for number in range(limits.MANIFEST_FILES)}
    forge_manifest(tmp_path / "c", lambda fields: fields["files"].update(many))
    with pytest.raises(Damaged, match="more than the limit"):
        holdfast.open(tmp_path / "c")
