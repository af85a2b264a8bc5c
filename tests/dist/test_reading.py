"""Storages that cannot be mapped: each byte is read once per host and shared in windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.storage.local import LocalStorage
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.sliced(6)

ROWS, COLUMNS = 1003, 517
PLACEMENTS: dict[str, list[Any]] = {"rows": [Shard(0)], "columns": [Shard(1)], "replicas": [Replicate()]}


def tensors(placement: str, *, zero: bool = False) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    torch.manual_seed(0)
    fulls = [torch.randn(ROWS, COLUMNS), torch.randn(ROWS, 1, COLUMNS, dtype=torch.float64), torch.randn(7)]
    dim = {"rows": 0, "columns": 1, "replicas": 0}[placement]
    out: dict[str, Any] = {}
    for index, full in enumerate(fulls):
        kind = Shard(min(dim * 2, full.ndim - 1)) if full.ndim == 3 and dim else PLACEMENTS[placement][0]
        if full.ndim == 1 and dim:
            kind = Shard(0)
        from torch.distributed.tensor import distribute_tensor

        tensor = distribute_tensor(full, mesh, [kind])
        out[f"t{index}"] = DTensor.from_local(
            torch.zeros_like(tensor.to_local()) if zero else tensor.to_local(), mesh, [kind], run_check=False,
            shape=full.shape, stride=full.stride(),
        )  # fmt: skip
    return out


def _save(root: str) -> None:
    storage = LocalStorage(Path(root))
    holdfast.Checkpointer(storage, block_bytes=64 * 4096).save(1, {"weights": tensors("rows")}).result()


def _restore(root: str, placement: str, mappable: bool, verify: bool) -> tuple[int, int]:
    checkpointer = holdfast.Checkpointer(LocalStorage(Path(root), mappable=mappable), deadline_s=60)
    state = {"weights": tensors(placement, zero=True)}
    assert checkpointer.restore(state, verify=verify) == 1
    truth = tensors(placement)
    for key, tensor in state["weights"].items():
        assert torch.equal(tensor.to_local(), truth[key].to_local()), key
    assert checkpointer.last_report is not None
    return checkpointer.last_report.read_bytes, checkpointer.last_report.needed_bytes


@pytest.mark.full
@pytest.mark.parametrize("mappable", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_each_byte_comes_from_storage_once_per_host(tmp_path: Path, placement: str, mappable: bool) -> None:
    run_ranks(4, _save, str(tmp_path))
    stored = ROWS * COLUMNS * 12 + 28
    for verify in (False, True):
        figures = run_ranks(4, _restore, str(tmp_path), placement, mappable, verify)
        read, needed = (sum(column) for column in zip(*figures, strict=True))
        assert needed == stored * (4 if placement == "replicas" else 1)
        assert stored <= read <= stored * 1.05
    alone = run_ranks(3, _restore, str(tmp_path), placement, mappable, False, hosts=["a", "b", "c"])
    if placement == "columns":  # small gaps between the rows are read, too
        assert all(needed <= read <= stored for read, needed in alone)
    else:
        assert [read for read, _ in alone] == [needed for _, needed in alone], "a host reads what it needs, no more"


def _restore_damaged(root: str) -> str:
    checkpointer = holdfast.Checkpointer(LocalStorage(Path(root), mappable=False), deadline_s=60)
    try:
        checkpointer.restore({"weights": tensors("columns", zero=True)})
    except holdfast.Damaged as error:
        return str(error)
    raise AssertionError("damage was not seen")


def test_damage_in_a_shared_block_is_an_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(4, _save, str(tmp_path))
    path = tmp_path / "step-000000000001" / "weights-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    said = run_ranks(4, _restore_damaged, str(tmp_path))
    assert len(set(said)) == 1 and "digest" in said[0]
