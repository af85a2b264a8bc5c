"""One state in many layouts: a small Llama-like model with AdamW moments, held in every way."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast

HIDDEN, FEED, VOCAB, LAYERS = 24, 53, 101, 3
TIES = {"lm_head.weight": "model.embed_tokens.weight"}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=True)
        self.o_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up_proj = nn.Linear(HIDDEN, FEED, bias=False)
        self.down_proj = nn.Linear(FEED, HIDDEN, bias=True)
        self.norm = Norm()


class Body(nn.Module):
    def __init__(self, layers: Iterable[int], *, embed: bool, norm: bool) -> None:
        super().__init__()
        if embed:
            self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(index): Layer() for index in layers})
        if norm:
            self.norm = Norm()
        self.register_buffer("scale", torch.zeros(()))


class Llama(nn.Module):
    """The whole model, or a pipeline stage of it with the same keys."""

    def __init__(
        self, layers: Iterable[int] = range(LAYERS), *, tied: bool, first: bool = True, last: bool = True
    ) -> None:
        super().__init__()
        self.model = Body(layers, embed=first, norm=last)
        if last:
            self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
            if tied and first:
                self.lm_head.weight = self.model.embed_tokens.weight


def fill(model: nn.Module, salt: str, *, tied: bool) -> None:
    """Give every parameter and buffer the values that its key and `salt` determine."""
    with torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            stored = TIES.get(key, key) if tied else key
            generator = torch.Generator().manual_seed(zlib.crc32(f"{salt}{stored}".encode()))
            tensor.copy_(torch.randn(tensor.shape, generator=generator))


@dataclass
class Held:
    """A live state and the arguments a save or load of it needs."""

    state: dict[str, Any]
    ties: dict[str, str]


Shape = Callable[[nn.Module], nn.Module]


def with_moments(shape: Shape, make: Callable[[], nn.Module], salt: str, *, tied: bool, retie: bool = False) -> Held:
    """A model with AdamW whose moments are laid out as the parameters are, by shaping models of moments."""
    shaped = {}
    for part in ("", "exp_avg", "exp_avg_sq"):
        model = make()
        fill(model, salt + part, tied=tied)
        shaped[part] = shape(model)
        if retie:
            inner = shaped[part]
            inner.lm_head.weight = inner.model.embed_tokens.weight
    model = shaped[""]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    moments = {name: dict(shaped[name].named_parameters()) for name in ("exp_avg", "exp_avg_sq")}
    for key, parameter in model.named_parameters():
        optimizer.state[parameter] = {"step": torch.tensor(7.0)} | {
            name: moments[name][key].detach() for name in moments
        }
    return Held({"model": model, "optimizer": optimizer}, TIES if tied else {})


def plain(salt: str, tied: bool) -> Held:
    return with_moments(lambda model: model, lambda: Llama(tied=tied), salt, tied=tied)


def ddp(salt: str, tied: bool) -> Held:
    return with_moments(nn.parallel.DistributedDataParallel, lambda: Llama(tied=tied), salt, tied=tied)


def _fsdp(model: Any, mesh: Any) -> Any:
    for layer in model.model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(salt: str, tied: bool) -> Held:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return with_moments(lambda model: _fsdp(model, mesh), lambda: Llama(tied=tied), salt, tied=tied)


def hsdp(salt: str, tied: bool) -> Held:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return with_moments(lambda model: _fsdp(model, mesh), lambda: Llama(tied=tied), salt, tied=tied)


def _tp(model: nn.Module, mesh: Any) -> nn.Module:
    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        plan |= {f"{layer}.q_proj": ColwiseParallel(), f"{layer}.o_proj": RowwiseParallel()}
        plan |= {f"{layer}.up_proj": ColwiseParallel(), f"{layer}.down_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def tp(salt: str, tied: bool) -> Held:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    return with_moments(lambda model: _tp(model, mesh), lambda: Llama(tied=tied), salt, tied=tied, retie=tied)


def fsdp_tp(salt: str, tied: bool) -> Held:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))

    def shape(model: nn.Module) -> nn.Module:
        model = _tp(model, mesh["tp"])
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
        return _fsdp(model, mesh["dp"])

    return with_moments(shape, lambda: Llama(tied=tied), salt, tied=tied)


def pipeline(salt: str, tied: bool) -> Held:
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = [index for index in range(LAYERS) if index * world // LAYERS == rank]

    def make() -> nn.Module:
        return Llama(layers, tied=tied, first=rank == 0, last=rank == world - 1)

    return with_moments(lambda model: model, make, salt, tied=tied)


class FlatAdamW(torch.optim.Optimizer):
    """ZeRO-1 over one flat buffer: each rank has the moments of a slice of all elements."""

    def __init__(self, parameters: Iterable[nn.Parameter], salt: str, keys: dict[int, str], lr: float = 0.01) -> None:
        super().__init__(list(parameters), {"lr": lr, "weight_decay": 0.1})
        self.shards: list[holdfast.FlatShard] = []
        owned = [parameter for group in self.param_groups for parameter in group["params"]]
        total = sum(parameter.numel() for parameter in owned)
        rank, world = dist.get_rank(), dist.get_world_size()
        begin, end = total * rank // world, total * (rank + 1) // world
        position = 0
        for parameter in owned:
            first, last = max(begin, position), min(end, position + parameter.numel())
            if first < last:
                self._hold(parameter, keys[id(parameter)], first - position, last - position, salt)
            position += parameter.numel()

    def _hold(self, parameter: nn.Parameter, key: str, start: int, stop: int, salt: str) -> None:
        shape = tuple(parameter.shape)
        for name in ("exp_avg", "exp_avg_sq"):
            generator = torch.Generator().manual_seed(zlib.crc32(f"{salt}{name}{key}".encode()))
            full = torch.randn(shape, generator=generator)
            local = full.reshape(-1)[start:stop].clone()
            self.shards.append(holdfast.FlatShard(parameter, name, shape, start, local))
        self.shards.append(holdfast.FlatShard(parameter, "step", (), 0, torch.tensor(7.0 if salt == "truth" else 0.0)))

    def holdfast_shards(self) -> list[holdfast.FlatShard]:
        return self.shards

    def step(self, closure: Any = None) -> Any:
        raise AssertionError("the tests only move its state")


def flat_zero1(salt: str, tied: bool) -> Held:
    model = Llama(tied=tied)
    fill(model, salt, tied=tied)
    keys = {id(parameter): key for key, parameter in model.named_parameters()}
    return Held({"model": model, "optimizer": FlatAdamW(model.parameters(), salt, keys)}, TIES if tied else {})


def torch_zero(salt: str, tied: bool) -> Held:
    whole = plain(salt, tied)
    model, full = whole.state["model"], whole.state["optimizer"]
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01, weight_decay=0.1
    )
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            optimizer.optim.state[parameter] = full.state[parameter]
    return Held({"model": model, "optimizer": optimizer}, whole.ties)


LAYOUTS: dict[str, tuple[int, Callable[[str, bool], Held]]] = {
    "single": (1, plain),
    "ddp-2": (2, ddp),
    "fsdp-2": (2, fsdp),
    "fsdp-3": (3, fsdp),
    "fsdp-4": (4, fsdp),
    "tp-2": (2, tp),
    "tp-4": (4, tp),
    "fsdp-tp-2x2": (4, fsdp_tp),
    "hsdp-2x2": (4, hsdp),
    "pipeline-2": (2, pipeline),
    "pipeline-3": (3, pipeline),
    "flat-zero1-2": (2, flat_zero1),
    "flat-zero1-3": (3, flat_zero1),
    "torch-zero-2": (2, torch_zero),
}


def local_tensors(held: Held) -> dict[str, torch.Tensor]:
    """Everything this rank holds, by label."""
    out: dict[str, torch.Tensor] = {}
    model, optimizer = held.state["model"], held.state["optimizer"]
    for key, tensor in model.state_dict().items():
        out[key] = _local(tensor)
    if isinstance(optimizer, FlatAdamW):
        return out | {f"{index}/{shard.state}": shard.tensor for index, shard in enumerate(optimizer.shards)}
    inner = getattr(optimizer, "optim", optimizer)
    for index, parameter in enumerate(p for group in inner.param_groups for p in group["params"]):
        out |= {f"{index}/{name}": _local(value) for name, value in inner.state[parameter].items()}
    return out


def local_values(held: Held) -> dict[str, torch.Tensor]:
    """Copies of everything this rank holds, to compare two lives of one layout."""
    return {label: tensor.clone() for label, tensor in local_tensors(held).items()}


def scramble(held: Held) -> None:
    """Put other values everywhere, so that a load has something to do."""
    with torch.no_grad():
        for tensor in local_tensors(held).values():
            tensor.fill_(-3.0)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
