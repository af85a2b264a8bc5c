"""Dims that do not divide: what FSDP2 over tensor parallelism holds, down to ranks with nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from tests.dist.harness import run_ranks

SIZES = range(1, 21)


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for size in SIZES:
            self.add_module(f"c{size}", nn.Linear(size, size))
            self.add_module(f"r{size}", nn.Linear(size, size))


def build() -> Many:
    torch.manual_seed(3)
    return Many()


def _round_trip(root: str, sizes: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    model: Any = build()
    plan: dict[str, Any] = {
        name: ColwiseParallel() if name[0] == "c" else RowwiseParallel() for name, _ in model.named_children()
    }
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    holdfast.save(f"{root}/{sizes[0]}x{sizes[1]}", {"model": model}, block_bytes=4096)
    truth = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.to_local().detach().fill_(-1)
    holdfast.load(f"{root}/single", {"model": model})
    for (key, parameter), value in zip(model.named_parameters(), truth, strict=True):
        assert torch.equal(parameter.to_local(), value), key


@pytest.mark.full
def test_every_small_size_on_meshes_that_do_not_divide_it(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "single", {"model": build()}, block_bytes=4096)
    expected = (tmp_path / "single" / "model-00001-of-00001.safetensors").read_bytes()
    for sizes in ((4, 2), (2, 4), (2, 3)):
        run_ranks(sizes[0] * sizes[1], _round_trip, str(tmp_path), sizes, deadline_s=180)
        found = (tmp_path / f"{sizes[0]}x{sizes[1]}" / "model-00001-of-00001.safetensors").read_bytes()
        assert found == expected, sizes
