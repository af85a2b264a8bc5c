"""Several ranks and hosts on an object store: one rank writes each file, and the bytes are those of local files."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.core.names import step_folder
from holdfast.storage import shared_storage_at
from tests.dist.harness import run_ranks
from tests.objects.work import files_of, restore, save_once, save_twice

HOSTS = {"one": ["a", "a"], "two": ["a", "a", "b", "b"]}


@pytest.mark.full
@pytest.mark.sliced(2)
@pytest.mark.parametrize(("hosts", "dim"), [("two", 1), ("one", 0)])
def test_any_number_of_hosts_writes_the_bytes_of_a_local_save(root: str, tmp_path: Path, hosts: str, dim: int) -> None:
    written = run_ranks(len(HOSTS[hosts]), save_twice, root, dim, hosts=HOSTS[hosts])
    run_ranks(1, save_twice, str(tmp_path), 0)
    for step in (1, 2):
        assert files_of(root, step_folder(step)) == files_of(str(tmp_path), step_folder(step))
    checkpoint = holdfast.open(f"{root.split('?', maxsplit=1)[0]}/{step_folder(2)}")
    assert checkpoint.verify().good
    size = sum(size for name, size in checkpoint.storage.files(step_folder(2)).items() if name.endswith("safetensors"))  # type: ignore[attr-defined]
    assert sum(rank[-1][1] for rank in written) == size
    assert sum(rank[-1][1] > 0 for rank in written) > 1, "one rank wrote every file"
    assert shared_storage_at(root).hidden() == []
    assert run_ranks(2, restore, root, dim) == [2, 2]


def test_a_blocking_save_of_two_hosts_is_the_same(root: str, tmp_path: Path) -> None:
    run_ranks(2, save_once, root, 1, hosts=["a", "b"])
    run_ranks(1, save_once, str(tmp_path), 0)
    assert files_of(root, "once") == files_of(str(tmp_path), "once")
