"""Programs with sharded weights on real ranks: tensor parallel DTensors, FSDP2 and DDP, beside a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.spmd.base.torch_versions import is_torch_2_11
from tests.adapters.program.models import AUTO
from tests.dist.harness import run_ranks

COLUMNS, ROWS = ("gate", "query", "key", "value", "head"), ("down", "out")


class Attention(nn.Module):
    """A decoder layer with a constant, a no_grad block and heads; every size is even."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.gate, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 32, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 16), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        hidden = self.emb(ids) * self.scale
        with torch.no_grad():
            places = torch.arange(length, device=ids.device)
            mask = places[:, None] >= places[None, :]
        q, k, v = (each(hidden).view(rows, length, 4, 4).transpose(1, 2) for each in (self.query, self.key, self.value))
        scores = (q @ k.transpose(2, 3) / 2).masked_fill(~mask, float("-inf")).softmax(-1)
        hidden = hidden + self.out((scores @ v).transpose(1, 2).reshape(rows, length, 16))
        return self.head(hidden + self.down(torch.relu(self.gate(self.norm(hidden)))))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Attention().double().eval()


def _ids() -> torch.Tensor:
    return torch.arange(24).reshape(4, 6) * 7 % 32


def _save(path: str) -> None:
    model = _model()
    program = holdfast.export_program(model, (_ids(),), ({0: torch.export.Dim("rows"), 1: AUTO},))
    holdfast.save(path, {"model": model}, program=program)


def _expected() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = _model()
    out = model(_ids())
    out.square().mean().backward()
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _check_gradients(module: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = {name.removeprefix("module."): _whole(each.grad) for name, each in module.named_parameters()}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


def _shard(module: nn.Module) -> None:
    """Shard the weights over all ranks as tensor parallelism does; what is neither columns nor rows is replicated."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            dim = 0 if path in COLUMNS else 1 if path in ROWS and name == "weight" else None
            placement = Replicate() if dim is None else Shard(dim)
            part._parameters[name] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))


def _tensor_parallel(path: str, on_meta: bool) -> None:
    out, gradients = _expected()
    module = holdfast.load_program(path, device="meta" if on_meta else None)
    _shard(module)
    if on_meta:
        holdfast.load(path, {"model": module})
    found = module(_ids())
    torch.testing.assert_close(_whole(found), out, rtol=1e-10, atol=1e-12)
    _whole(found).square().mean().backward()
    _check_gradients(module, gradients)
    sharded = module.get_parameter("gate.weight")
    assert isinstance(sharded, DTensor) and sharded.to_local().shape == (16, 16)


@pytest.mark.skipif(is_torch_2_11(), reason="torch 2.11 refuses the flattening of a sharded dim that the program has")
@pytest.mark.sliced(2)
@pytest.mark.parametrize("on_meta", [True, False], ids=["filled by load", "sharded in memory"])
def test_a_program_runs_tensor_parallel(tmp_path: Path, on_meta: bool) -> None:
    run_ranks(1, _save, str(tmp_path / "x"))
    run_ranks(2, _tensor_parallel, str(tmp_path / "x"), on_meta)


def _data_parallel(path: str, how: str) -> None:
    out, gradients = _expected()
    module: Any = holdfast.load_program(path, device="meta" if how == "fsdp" else None)
    if how == "fsdp":
        fully_shard(module)
        module.to_empty(device="cpu")
        holdfast.load(path, {"model": module})
    else:
        module = DistributedDataParallel(module)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    for _ in range(2):  # FSDP2 frees and gathers the weights again
        module.zero_grad()
        found = module(_ids()[mine])
        torch.testing.assert_close(found, out[mine], rtol=1e-10, atol=1e-12)
        found.square().mean().backward()
        _check_gradients(module, gradients)


@pytest.mark.sliced(2)
@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_a_program_trains_data_parallel(tmp_path: Path, how: str) -> None:
    run_ranks(1, _save, str(tmp_path / "x"))
    run_ranks(2, _data_parallel, str(tmp_path / "x"), how)


def _layerwise(path: str) -> None:
    module: Any = holdfast.load_program(path)
    fully_shard(module.gate)
    fully_shard(module)
    with pytest.raises(holdfast.Unsupported, match=r"fully_shard\(\) was called on 'gate'"):
        module(_ids())


def test_fully_shard_of_a_part_of_a_program_is_refused(tmp_path: Path) -> None:
    """The parts have no forward, so that FSDP2 never gathers their weights, and ranks have other inputs."""
    run_ranks(1, _save, str(tmp_path / "x"))
    run_ranks(2, _layerwise, str(tmp_path / "x"))
