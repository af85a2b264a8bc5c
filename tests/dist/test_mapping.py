"""Mappings between live ranks and files: other names, fused and turned weights, on any layout."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.sliced(3)

HEADS, GROUPS, HEAD, HIDDEN, FEED, VOCAB, LAYERS = 6, 3, 5, 22, 53, 37, 2
PROGRAM = """
# what the file calls q, k and v is one weight in memory, group by group
layers.$LAYER_ID.q.weight, layers.$LAYER_ID.k.weight, layers.$LAYER_ID.v.weight ->
    layers.$LAYER_ID.qkv.weight, fused_qkv, num_heads=6, num_key_value_groups=3, axis=0
layers.$LAYER_ID.gate.weight, layers.$LAYER_ID.up.weight -> layers.$LAYER_ID.gate_up.weight, axis=0
layers.$LAYER_ID.out.weight^T -> layers.$LAYER_ID.turned.weight
embed.weight -> tokens.weight
"""


class Weight(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape))


class Layer(nn.Module):
    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        if fused:
            self.qkv = Weight((HEADS + 2 * GROUPS) * HEAD, HIDDEN)
            self.gate_up = Weight(2 * FEED, HIDDEN)
            self.turned = Weight(HEADS * HEAD, HIDDEN)
        else:
            self.q, self.k, self.v = Weight(HEADS * HEAD, HIDDEN), Weight(GROUPS * HEAD, HIDDEN), Weight(15, HIDDEN)
            self.gate, self.up = Weight(FEED, HIDDEN), Weight(FEED, HIDDEN)
            self.out = Weight(HIDDEN, HEADS * HEAD)
        self.norm = Weight(HIDDEN)


class Model(nn.Module):
    def __init__(self, *, fused: bool, layers: range = range(LAYERS)) -> None:
        super().__init__()
        if 0 in layers:
            if fused:
                self.tokens = Weight(VOCAB, HIDDEN)
            else:
                self.embed = Weight(VOCAB, HIDDEN)
        self.layers = nn.ModuleDict({str(index): Layer(fused=fused) for index in layers})


def separate_values(seed: int) -> dict[str, torch.Tensor]:
    """The true values of the separate naming."""
    torch.manual_seed(seed)
    return {key: torch.randn(parameter.shape) for key, parameter in Model(fused=False).named_parameters()}


def fused_values(separate: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same values as the fused model holds them, written with torch alone."""
    out = {"tokens.weight": separate["embed.weight"]}
    for index in range(LAYERS):
        at = f"layers.{index}."
        q, k, v = (separate[f"{at}{name}.weight"] for name in "qkv")
        rows = []
        for group in range(GROUPS):
            per = HEADS // GROUPS * HEAD
            own = slice(group * HEAD, (group + 1) * HEAD)
            rows += [q[group * per : (group + 1) * per], k[own], v[own]]
        out[f"{at}qkv.weight"] = torch.cat(rows)
        out[f"{at}gate_up.weight"] = torch.cat([separate[f"{at}gate.weight"], separate[f"{at}up.weight"]])
        out[f"{at}turned.weight"] = separate[f"{at}out.weight"].T.contiguous()
        out[f"{at}norm.weight"] = separate[f"{at}norm.weight"]
    return out


def held(layout: str, *, fused: bool, values: list[dict[str, torch.Tensor]] | None) -> dict[str, Any]:
    """A model and its AdamW on a layout, with these weights and moments; zeros without values."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if layout != "one" else (0, 1)
    layers = range(rank % LAYERS, rank % LAYERS + 1) if layout == "stages" else range(LAYERS)
    model = Model(fused=fused, layers=layers)
    if layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    elif layout in ("rows", "columns"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        for module in [module for module in model.modules() if isinstance(module, Weight)]:
            dim = min(1, module.weight.ndim - 1) if layout == "columns" else 0
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(dim)]))
    elif layout == "mesh":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        for module in [module for module in model.modules() if isinstance(module, Weight)]:
            placement = [Replicate(), Shard(module.weight.ndim - 1)]
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, placement))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125 if values else 0.5)
    for key, parameter in model.named_parameters():
        states = [v[key] for v in values] if values else [torch.zeros(parameter.shape)] * 3
        with torch.no_grad():
            fill(parameter, states[0])
        if values is None:
            continue
        moments = [torch.empty_like(parameter), torch.empty_like(parameter)]
        for tensor, state in zip(moments, states[1:], strict=True):
            fill(tensor, state)
        optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return {"model": model, "optimizer": optimizer}


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        whole = distribute_tensor(full, tensor.device_mesh, tensor.placements)
        tensor.to_local().copy_(whole.to_local())
    else:
        tensor.detach().copy_(full)


def truths(*, fused: bool) -> list[dict[str, torch.Tensor]]:
    values = [separate_values(seed) for seed in (1, 2, 3)]
    return [fused_values(v) for v in values] if fused else values


def check(state: dict[str, Any], *, fused: bool) -> None:
    """Every weight and moment is the true one, bit for bit."""
    weights, first, second = truths(fused=fused)
    for key, parameter in state["model"].named_parameters():
        moments = state["optimizer"].state[parameter]
        found = [(parameter, weights), (moments["exp_avg"], first), (moments["exp_avg_sq"], second)]
        for tensor, truth in found:
            own, expected = tensor, truth[key]
            if isinstance(tensor, DTensor):
                expected = distribute_tensor(expected, tensor.device_mesh, tensor.placements).to_local()
                own = tensor.to_local()
            assert torch.equal(own, expected), key
        assert moments["step"] == 7
    assert state["optimizer"].param_groups[0]["lr"] == 0.125


def save(path: str, layout: str, fused: bool, mapping: Any) -> None:
    holdfast.save(path, held(layout, fused=fused, values=truths(fused=fused)), mapping=mapping)


def load(path: str, layout: str, fused: bool, mapping: Any, verify: bool) -> tuple[int, int]:
    state = held(layout, fused=fused, values=None)
    report = holdfast.load(path, state, mapping=mapping, verify=verify)
    check(state, fused=fused)
    return report.read_bytes, report.needed_bytes


def alone(function: Any, *arguments: Any) -> Any:
    return [function(*arguments)]


def ranks_for(layout: str) -> Any:
    return alone if layout == "one" else lambda *arguments: run_ranks(3 if layout == "rows" else 4, *arguments)


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob("*.safetensors*"))}


@pytest.mark.parametrize("layout", ["one", "rows", "columns", "mesh", "fsdp", "stages"])
def test_a_mapping_loads_onto_any_layout(tmp_path: Path, layout: str) -> None:
    save(str(tmp_path / "separate"), "one", False, None)
    for verify in (True, False):
        figures = ranks_for(layout)(load, str(tmp_path / "separate"), layout, True, PROGRAM, verify)
    read, needed = (sum(column) for column in zip(*figures, strict=True))
    assert read <= 1.1 * needed


@pytest.mark.parametrize("layout", ["one", "rows", "columns", "mesh", "fsdp", "stages"])
def test_a_mapping_saves_the_same_bytes_from_any_layout(tmp_path: Path, layout: str) -> None:
    back = str(holdfast.Mapping.parse(PROGRAM).reverse({key: v.shape for key, v in separate_values(0).items()}))
    save(str(tmp_path / "separate"), "one", False, None)
    ranks_for(layout)(save, str(tmp_path / "mapped"), layout, True, back)
    assert digests(tmp_path / "mapped") == digests(tmp_path / "separate")
    load(str(tmp_path / "mapped"), "one", False, None, True)


def _run(root: str, layout: str) -> int:
    shapes = {key: value.shape for key, value in separate_values(0).items()}
    back = holdfast.Mapping.parse(PROGRAM).reverse(shapes)
    with holdfast.Checkpointer(root, mapping=back) as checkpointer:
        state = held(layout, fused=True, values=truths(fused=True))
        for step in (1, 2):
            checkpointer.save(step, state).result(60)
    state = held(layout, fused=True, values=None)
    with holdfast.Checkpointer(root, mapping=back) as checkpointer:
        restored = checkpointer.restore(state)
    check(state, fused=True)
    assert restored is not None
    return restored


@pytest.mark.parametrize("layout", ["one", "mesh", "fsdp"])
def test_a_run_saves_through_a_mapping_and_resumes_through_its_reverse(tmp_path: Path, layout: str) -> None:
    save(str(tmp_path / "separate"), "one", False, None)
    assert set(ranks_for(layout)(_run, str(tmp_path / "run"), layout)) == {2}
    assert digests(tmp_path / "run" / "step-000000000002") == digests(tmp_path / "separate")


def _save_unequal_steps(path: str) -> None:
    state = held("one", fused=False, values=truths(fused=False))
    model, optimizer = state["model"], state["optimizer"]
    optimizer.state[model.layers["1"].k.weight]["step"] = torch.tensor(8.0)
    holdfast.save(path, state)


def test_step_counts_that_become_one_must_be_one(tmp_path: Path) -> None:
    _save_unequal_steps(str(tmp_path / "separate"))
    state = held("one", fused=True, values=None)
    with pytest.raises(holdfast.Mismatch, match=r"layers\.1\.qkv\.weight/step.*8\.0"):
        holdfast.load(tmp_path / "separate", state, mapping=PROGRAM)
    assert all(not parameter.any() for parameter in state["model"].parameters()), "nothing was touched"


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save(str(tmp_path / "separate"), "one", False, None)
    state = held("one", fused=True, values=None)
    with pytest.raises(holdfast.Mismatch, match="tokens"):
        holdfast.load(tmp_path / "separate", state, mapping=PROGRAM.replace("tokens.weight", "token.weight"))
    with pytest.raises(holdfast.Mismatch, match="embed"):
        holdfast.load(tmp_path / "separate", state, mapping=PROGRAM.replace("embed.weight -> tokens.weight", ""))
    with pytest.raises(holdfast.InvalidArgument, match="line"):
        holdfast.load(tmp_path / "separate", state, mapping=PROGRAM + "\na -> , b")
    removed = PROGRAM.replace("embed.weight -> tokens.weight", "embed.weight -> _\n_ -> tokens.weight")
    report = holdfast.load(tmp_path / "separate", state, mapping=removed)
    assert not state["model"].tokens.weight.any(), "it keeps its value"
    assert not report.missing and not report.unexpected


FFN = "gate, up -> fused, fused_ffn"


def _interleaved(path: str, back: str) -> None:
    """Column shards of a fused weight hold their own gate and up, by the degree of the live mesh."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    state = {"model": {"fused": distribute_tensor(torch.zeros(5, 16), mesh, [Shard(1)])}}
    holdfast.load(path, state, mapping=FFN)
    gate, up = torch.arange(40.0).reshape(5, 8), -torch.arange(40.0).reshape(5, 8)
    own = slice(rank * 4, rank * 4 + 4)
    assert torch.equal(state["model"]["fused"].to_local(), torch.cat([gate[:, own], up[:, own]], dim=1))
    holdfast.save(back, state, mapping="fused -> gate, up, fused_ffn")


def test_the_degree_of_interleaved_weights_is_that_of_the_live_mesh(tmp_path: Path) -> None:
    gate, up = torch.arange(40.0).reshape(5, 8), -torch.arange(40.0).reshape(5, 8)
    holdfast.save(tmp_path / "separate", {"model": {"gate": gate, "up": up}})
    run_ranks(2, _interleaved, str(tmp_path / "separate"), str(tmp_path / "back"))
    assert digests(tmp_path / "back") == digests(tmp_path / "separate")
    alone = {"model": {"fused": torch.zeros(5, 16)}}
    holdfast.load(tmp_path / "separate", alone, mapping=FFN)
    assert torch.equal(alone["model"]["fused"], torch.cat([gate, up], dim=1))
