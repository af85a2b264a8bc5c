"""Runs with torchao's low-bit optimizers on FSDP2 ranks; each function runs on every rank of a forked group."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
import torchao.optim
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.float8.float8_training_tensor import LinearMMConfig
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

import holdfast
from holdfast.adapters.weight_wrappers import local_tensor

DIVISIBLE = {"rows": (64, 256), "narrow": (128, 200), "long": (32768,), "small": (64,)}
UNEVEN = {
    **{"mixed": (3, 2048), "one_row": (1, 4096), "vector": (8192,), "odd": (7, 1000)},
    "rows": (64, 256),
}


class Parameters(nn.Module):
    """A model of bare parameters; gradients are given, so that layouts differ in nothing but the layout."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        super().__init__()
        for key, shape in shapes.items():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            self.register_parameter(key, nn.Parameter(torch.randn(shape, generator=generator)))


def ranks() -> int:
    """Join the group of this scenario; returns its size."""
    dist.init_process_group("gloo")
    return dist.get_world_size()


def build(shapes: dict[str, tuple[int, ...]], kind: str, world: int) -> dict[str, Any]:
    model: Any = Parameters(shapes)
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)))
    return {"model": model, "optimizer": getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)}


def train(state: dict[str, Any], steps: range) -> None:
    """Take steps with gradients that follow from the step and the key."""
    with torch.compiler.set_stance("force_eager"):
        for step in steps:
            for key, param in state["model"].named_parameters():
                generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {step}".encode()))
                grad = torch.randn(param.shape, generator=generator)
                if isinstance(param, DTensor):
                    grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
                param.grad = grad
            state["optimizer"].step()


def weights(state: dict[str, Any]) -> dict[str, Any]:
    """Return the whole weights as arrays."""
    tensors = state["model"].named_parameters()
    return {key: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy().copy() for key, p in tensors}


def kinds(state: dict[str, Any]) -> dict[str, str]:
    """Return the classes of the local tensors of the first moments."""
    own = state["optimizer"].state
    named = state["model"].named_parameters()
    return {key: type(local_tensor(own[param]["exp_avg"])).__name__ for key, param in named}


def run(root: str, kind: str, shapes: dict[str, tuple[int, ...]], name: str, sources: list[str]) -> list[Any]:
    """Train 2 steps, save as `name`, and take 2 more; the same from each of the `sources`. Returns the weights."""
    world = ranks()
    out = []
    if name:
        state = build(shapes, kind, world)
        train(state, range(2))
        with holdfast.Checkpointer(f"{root}/{name}") as checkpointer:
            checkpointer.save(2, state).result(60)
        train(state, range(2, 4))
        out.append(weights(state))
    for source in sources:
        state = build(shapes, kind, world)  # without states
        with holdfast.Checkpointer(f"{root}/{source}") as checkpointer:
            assert checkpointer.restore(state) == 2
        holdfast.save(f"{root}/{source}-on-{world}", state)
        train(state, range(2, 4))
        out.append(weights(state))
    return out


def errors(root: str, kind: str, shapes: dict[str, tuple[int, ...]], source: str) -> tuple[str, dict[str, str], Any]:
    """Load on another layout: the refusal, then with cast=True. Returns it, the classes, and the weights."""
    state = build(shapes, kind, ranks())
    text = ""
    try:
        holdfast.load(f"{root}/{source}/step-000000000002", state)
    except holdfast.Mismatch as error:
        text = str(error)
    try:
        holdfast.load(f"{root}/{source}/step-000000000002", state, cast=True)
    except holdfast.Mismatch as error:
        return text, {}, str(error)
    return text, kinds(state), moments(state)


def moments(state: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's first moments as arrays of numbers."""
    own = state["optimizer"].state
    out = {}
    for key, param in state["model"].named_parameters():
        local: Any = local_tensor(own[param]["exp_avg"])
        out[key] = (local.dequantize() if type(local) is not torch.Tensor else local).reshape(-1).numpy().copy()
    return out


def columns(root: str, kind: str) -> list[Any]:
    """Save and load states sharded by columns: blocks of one shard are blocks of the tensor, those of another not."""
    mesh = init_device_mesh("cpu", (ranks(),), mesh_dim_names=("tp",))

    def fresh() -> dict[str, Any]:
        model: Any = Parameters({"fits": (64, 512), "straddles": (64, 384)})
        for key, param in list(model.named_parameters()):
            model.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, [Shard(1)])))
        return {"model": model, "optimizer": getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)}

    state, again = fresh(), fresh()
    train(state, range(2))
    holdfast.save(f"{root}/columns", state)
    holdfast.load(f"{root}/columns", again)
    train(state, range(2, 4))
    train(again, range(2, 4))
    return [weights(state), weights(again)]


def float8_weights(root: str) -> None:
    """Save a model whose weights are wrapped for float8 matmuls, sharded; then load it with other values."""
    mesh = init_device_mesh("cpu", (ranks(),))

    def wrapped(scale: float) -> Any:
        model: Any = nn.Linear(64, 48, bias=False)
        weight = Parameters({"weight": (48, 64)}).weight.detach() * scale
        model.weight = nn.Parameter(WeightWithDynamicFloat8CastTensor(weight, LinearMMConfig(), torch.float8_e4m3fn))
        return fully_shard(model, mesh=mesh)

    holdfast.save(f"{root}/float8", {"model": wrapped(1.0)})
    live = wrapped(2.0)
    local = live.weight._local_tensor
    local._precomputed_scale = torch.ones(())  # as precompute_float8_dynamic_scale_for_fsdp sets it
    holdfast.load(f"{root}/float8", {"model": live})
    expected = Parameters({"weight": (48, 64)}).weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
    assert torch.equal(local._tensor, expected) and live.weight._local_tensor._precomputed_scale is None
