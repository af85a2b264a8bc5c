"""Sizes that lie: refused, or at least never believed before they are checked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.core.errors import Damaged
from tests.attacks.forge import examine, tensor, tensor_file
from tests.effort import at_most


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


def test_a_sparse_file_of_terabytes_opens_at_once(shm: Path) -> None:
    path = shm / "model.safetensors"
    path.write_bytes(tensor_file({"a": tensor(0, 2**46)}))
    os.truncate(path, path.stat().st_size + 2**46)
    with at_most(1):
        holdfast.open(shm).keys()
