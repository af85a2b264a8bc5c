"""The moving average on several ranks: the bytes of one process, and any layout goes on from any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from tests.dist.harness import run_ranks


def train(root: str, start: int, stop: int, device: str) -> dict[str, list[float]]:
    """Steps `start` to `stop`, resuming from `root`; the average at the end, whole."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
    ema = holdfast.EMA(model, 0.9, every=2, device=device)
    with holdfast.Checkpointer(root) as checkpointer:
        assert checkpointer.restore({"model": model, "ema": ema}) == (start or None)
        for step in range(start, stop):
            with torch.no_grad():
                for parameter in model.parameters():
                    # The same numbers on any layout: no gradient is summed in another order.
                    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    local.mul_(1.0 + 0.01 * step).add_(0.1)
            ema.update()
        checkpointer.save(stop, {"model": model, "ema": ema}).result(60)
    checkpoint = holdfast.open(Path(root) / f"step-{stop:012d}")
    return {key: checkpoint.read(key, "ema/model").flatten().tolist() for key in checkpoint.keys("ema/model")}


@pytest.mark.full
@pytest.mark.parametrize("device", ["same", pytest.param("cpu", marks=pytest.mark.full)])
def test_layouts_agree_and_take_over_from_each_other(tmp_path: Path, device: str) -> None:
    truth = run_ranks(1, train, str(tmp_path / "one"), 0, 9, "same")[0]
    for first, second in ((1, 3), (3, 2), (2, 1)):
        root = str(tmp_path / f"{first}-{second}")
        run_ranks(first, train, root, 0, 5, device)
        assert run_ranks(second, train, root, 5, 9, device)[0] == truth
        name = "step-000000000009/ema/model-00001-of-00001.safetensors"
        assert (Path(root) / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
