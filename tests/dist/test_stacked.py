"""Stacked experts on live ranks, one by one in the file: any layout, only the bytes of its own experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from tests.dist.harness import run_ranks
from tests.dist.test_mapping import digests, fill

pytestmark = pytest.mark.sliced(4)

EXPERTS, HIDDEN, WIDE, LAYERS = 5, 64, 48, 2


def apart(seed: int) -> dict[str, torch.Tensor]:
    """True values as the file has them: one weight for each expert."""
    torch.manual_seed(seed)
    out = {}
    for expert in (f"model.layers.{layer}.mlp.experts.{n}" for layer in range(LAYERS) for n in range(EXPERTS)):
        out |= {f"{expert}.{name}_proj.weight": torch.randn(WIDE, HIDDEN) for name in ("gate", "up")}
        out[f"{expert}.down_proj.weight"] = torch.randn(HIDDEN, WIDE)
    return out


def stacked(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as the model holds them, written with torch alone."""
    out = {}
    for experts in (f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)):
        each = [f"{experts}.{number}" for number in range(EXPERTS)]
        pairs = [torch.cat([values[f"{e}.gate_proj.weight"], values[f"{e}.up_proj.weight"]]) for e in each]
        out[f"{experts}.gate_up_proj"] = torch.stack(pairs)
        out[f"{experts}.down_proj"] = torch.stack([values[f"{e}.down_proj.weight"] for e in each])
    return out


def module_of(values: dict[str, torch.Tensor]) -> nn.Module:
    """A module with parameters under these dotted keys."""
    root = nn.Module()
    for key, value in values.items():
        *path, name = key.split(".")
        at = root
        for word in path:
            if not hasattr(at, word):
                at.add_module(word, nn.Module())
            at = getattr(at, word)
        at.register_parameter(name, nn.Parameter(value.clone()))
    return root


def held(layout: str, seed: int) -> dict[str, Any]:
    """A model on a layout with its AdamW, whose first moments are other values."""
    weights, moments = stacked(apart(seed)), stacked(apart(seed + 1))
    model = module_of(weights)
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)))
    elif layout != "one":
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size(),), mesh_dim_names=("ep" if layout == "experts" else "tp",)
        )
        dim = {"experts": 0, "rows": 1, "columns": 2}[layout]
        for experts in (layer.mlp.experts for layer in model.model.layers.children()):
            for name, parameter in list(experts.named_parameters()):
                experts.register_parameter(
                    name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(dim)]))
                )
    optimizer = torch.optim.AdamW(model.parameters())
    for key, parameter in model.named_parameters():
        first, second = torch.empty_like(parameter), torch.empty_like(parameter)
        fill(first, moments[key])
        fill(second, moments[key] ** 2)
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": second}
    return {"model": model, "optimizer": optimizer}


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def save(path: str, layout: str) -> None:
    holdfast.save(path, held(layout, 1), mapping="qwen3-moe-from-stacked")


def load(path: str, layout: str) -> tuple[int, int]:
    state, truth = held(layout, 5), held(layout, 1)
    report = holdfast.load(path, state, mapping="qwen3-moe-stacked", verify=False)
    pairs = zip(state["model"].parameters(), truth["model"].parameters(), strict=True)
    for got, expected in pairs:
        assert torch.equal(local(got), local(expected))
        states = state["optimizer"].state[got], truth["optimizer"].state[expected]
        assert all(torch.equal(local(states[0][name]), local(states[1][name])) for name in states[1])
    return report.read_bytes, report.needed_bytes


@pytest.mark.parametrize("layout", ["experts", "rows", "columns", "fsdp"])
def test_stacked_experts_are_saved_and_loaded_one_by_one_on_any_layout(tmp_path: Path, layout: str) -> None:
    weights, moments = apart(1), apart(2)
    model = module_of(weights)
    optimizer = torch.optim.AdamW(model.parameters())
    for key, parameter in model.named_parameters():
        first = moments[key]
        optimizer.state[parameter] = {"step": torch.tensor(3.0), "exp_avg": first, "exp_avg_sq": first**2}
    holdfast.save(tmp_path / "apart", {"model": model, "optimizer": optimizer})
    run_ranks(3, save, str(tmp_path / "mapped"), layout)
    assert digests(tmp_path / "mapped") == digests(tmp_path / "apart")
    figures = run_ranks(3, load, str(tmp_path / "mapped"), layout)
    read, needed = (sum(column) for column in zip(*figures, strict=True))
    assert read <= 1.1 * needed
