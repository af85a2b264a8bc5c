"""Hooks of load_state_dict on sharded and wrapped modules: torch's own and those of users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.dist.harness import run_ranks


class Derived(nn.Linear):
    """Counts its loads, and keeps the norm of its (whole) weight."""

    def __init__(self) -> None:
        super().__init__(5, 3)  # 3 rows on 2 ranks: FSDP2 pads a shard
        self.loads = 0
        self.register_load_state_dict_post_hook(Derived.derive)

    def derive(self, keys: Any) -> None:
        self.loads += 1
        weight = self.weight.detach()
        whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        self.total = whole.sum().item()


def _model(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(Derived(), nn.Linear(3, 2))
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model)


def _load(root: str, kind: str) -> list[Any]:
    saved, live = _model(kind, 1), _model(kind, 2)
    inputs = torch.ones(2, 5)
    if kind == "fsdp":
        live(inputs).sum().backward()  # FSDP2 has unsharded and gathered by now
    holdfast.save(root, {"model": saved})
    holdfast.load(root, {"model": live})
    layer = next(part for part in live.modules() if isinstance(part, Derived))
    source = next(part for part in saved.modules() if isinstance(part, Derived)).weight.detach()
    source = source.full_tensor() if hasattr(source, "full_tensor") else source
    same = torch.equal(live.eval()(inputs), saved.eval()(inputs))
    return [layer.loads, layer.total == source.sum().item(), same]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_post_hooks_run_on_every_rank(tmp_path: Path, kind: str) -> None:
    assert run_ranks(2, _load, str(tmp_path / "x"), kind) == [[1, True, True]] * 2


def _refused_on_one(root: str) -> str:
    """One rank has a pre-hook: every rank raises, and none is touched."""
    model = nn.Linear(2, 2)
    dist.broadcast(model.weight.data, 0)
    dist.broadcast(model.bias.data, 0)
    holdfast.save(root, {"model": model})
    live = DistributedDataParallel(nn.Linear(2, 2))
    if dist.get_rank() == 1:
        live.module.register_load_state_dict_pre_hook(lambda *args: None)
    before = live.module.weight.detach().clone()
    with pytest.raises(holdfast.Unsupported) as caught:
        holdfast.load(root, {"model": live})
    assert torch.equal(live.module.weight, before)
    return str(caught.value)


def test_a_pre_hook_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    for text in run_ranks(2, _refused_on_one, str(tmp_path / "x")):
        assert "has a load_state_dict pre-hook" in text
