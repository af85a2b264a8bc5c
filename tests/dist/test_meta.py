"""Models on the meta device loaded on real ranks: FSDP2, TP and both; optimizers made before and after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from tests.dist.harness import run_ranks


class Positions(nn.Module):
    """A table that no checkpoint holds."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(5), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.linspace(0, 1, 5))


class Tied(nn.Module):
    """Tied weights with rows that two ranks share unevenly, a buffer, and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 8)
        self.down = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.positions = Positions()
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.positions.table
        return self.head(self.norm(hidden + self.down(torch.relu(self.up(hidden)))))


def placed(model: Any, layout: str) -> Any:
    if layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if layout == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    fully_shard(model.up)
    return fully_shard(model)


def step(model: Any, optimizer: torch.optim.Optimizer) -> float:
    tokens = torch.arange(14).reshape(2, 7)[:, :1].flatten() % 7
    loss = model(tokens).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _save(path: str) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    holdfast.save(path, {"model": model, "optimizer": optimizer})


def _continue(path: str, layout: str, *, before: bool, on_meta: bool) -> list[Any]:
    with torch.device("meta" if on_meta else "cpu"):
        model: Any = Tied()
    model = placed(model, layout)
    if before:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        params = [id(param) for param in model.parameters()]
    state: dict[str, Any] = {"model": model}
    if on_meta:
        with pytest.raises(holdfast.Mismatch):
            holdfast.load(path, {"model": model, "other": 3})
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if before:
        report = holdfast.load(path, state | {"optimizer": optimizer})
        assert [id(param) for param in model.parameters()] == params
    else:
        report = holdfast.load(path, state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        holdfast.load(path, state | {"optimizer": optimizer})
    if on_meta:
        assert report.computed == ("model: positions.table",) and report.on_meta == () and not report.non_persistent
    assert model.head.weight is model.embed.weight
    losses = [step(model, optimizer).hex() for _ in range(3)]
    out = holdfast.save(f"{path}-{layout}-{before}-{on_meta}", state | {"optimizer": optimizer})
    files = [(Path(out.path) / file).read_bytes() for file in sorted(out.manifest.files) if "safetensors" in file]
    return [losses, files]


def _compare(path: str, layout: str) -> None:
    expected = _continue(path, layout, before=True, on_meta=False)
    for before in (True, False):
        assert _continue(path, layout, before=before, on_meta=True) == expected, before


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "fsdp"), pytest.param(2, "tp", marks=pytest.mark.full), pytest.param(4, "both", marks=pytest.mark.full)],
)
def test_a_model_on_meta_goes_on_as_one_in_memory(tmp_path: Path, world: int, layout: str) -> None:
    run_ranks(1, _save, str(tmp_path / "x"))
    run_ranks(world, _compare, str(tmp_path / "x"), layout)


def _hub(folder: str, layout: str) -> None:
    from tests.adapters.loading.test_computed_buffers import MODELS, hub_model

    for name, settings in MODELS:
        path = Path(folder) / name
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            hub_model(name, settings).save_pretrained(path)
        dist.barrier()
        with torch.device("meta"):
            live = hub_model(name, settings)
        if layout == "fsdp":
            for part in [part for part in live.modules() if isinstance(part, nn.ModuleList)]:
                for layer in part:
                    fully_shard(layer)
            fully_shard(live)
        report = holdfast.load(path, {"model": live})
        assert report.on_meta == () and not report.non_persistent, name
        pretrained = type(live).from_pretrained(path)
        buffers = dict(pretrained.named_buffers())
        assert all(torch.equal(value, buffers[key]) for key, value in live.named_buffers()), name
        if layout == "ddp":
            live = nn.parallel.DistributedDataParallel(live)
        tokens = torch.arange(8).reshape(1, 8)
        with torch.no_grad():
            assert torch.equal(live.eval()(tokens).logits, pretrained.eval()(tokens).logits), name


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_models_of_the_hub_built_on_meta_equal_from_pretrained(tmp_path: Path, layout: str) -> None:
    run_ranks(2, _hub, str(tmp_path), layout)


def _restore(root: str) -> None:
    with holdfast.Checkpointer(root) as checkpointer:
        model = placed(Tied(), "fsdp")
        checkpointer.save(1, {"model": model}).result(60)
        checkpointer.save(2, {"model": model}).result(60)
    dist.barrier()
    for path in Path(root).glob("step-*2/model*.safetensors"):
        if dist.get_rank() == 0:
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(bytes(data))
    dist.barrier()
    with torch.device("meta"):
        live = placed(Tied(), "fsdp")
    with holdfast.Checkpointer(root) as checkpointer:
        assert checkpointer.restore({"model": live}) == 1
    for (key, value), other in zip(live.state_dict().items(), model.state_dict().values(), strict=True):
        pairs = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (value, other)]
        assert torch.equal(*pairs), key


@pytest.mark.full
def test_a_restore_onto_meta_goes_back_to_the_step_before_a_damaged_one(tmp_path: Path) -> None:
    run_ranks(2, _restore, str(tmp_path / "run"))


def _one_rank_cannot(path: str) -> None:
    with torch.device("meta"):
        model = placed(Tied(), "fsdp")
        extra = nn.Linear(2, 2 + dist.get_rank())
    with pytest.raises(holdfast.Mismatch):
        holdfast.load(path, {"model": model, "extra": extra})
    with pytest.raises(holdfast.InvalidArgument, match="device="):
        holdfast.load(path, {"model": model}, device="meta" if dist.get_rank() else "cpu")
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.full
def test_an_error_on_one_rank_leaves_every_rank_on_meta(tmp_path: Path) -> None:
    run_ranks(1, _save, str(tmp_path / "x"))
    run_ranks(2, _one_rank_cannot, str(tmp_path / "x"))
