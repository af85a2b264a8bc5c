"""The hub's names of transformers models that FSDP2 ranks hold: weights and optimizer state, into another layout."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import holdfast
from tests.adapters.hub.architectures import tiny_model
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

DEADLINE_S = 300.0  # ranks import transformers
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "granitemoe", "jamba"]
OTHERS = ["llava", "gemma3", "qwen2_vl", "vit"]


def trained(model_type: str, mesh: Any = None) -> dict[str, Any]:
    """A model after one step of AdamW whose gradients are the same in every layout."""
    model = tiny_model(model_type)
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        placed = isinstance(parameter, DTensor)
        parameter.grad = (
            distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None) if placed else grad
        )
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def digests(state: dict[str, Any]) -> dict[str, str]:
    """A digest of every tensor by its name in memory."""
    out = {}
    names = {id(parameter): name for name, parameter in state["model"].named_parameters()}
    tensors = {f"model: {key}": tensor for key, tensor in state["model"].state_dict().items()}
    for group in state["optimizer"].param_groups:
        for parameter in group["params"]:
            for kind, tensor in state["optimizer"].state[parameter].items():
                tensors[f"{names[id(parameter)]}/{kind}"] = tensor
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        out[name] = hashlib.sha256(
            whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    return out


def _save_sharded(folder: str, model_type: str) -> dict[str, str]:
    state = trained(model_type, init_device_mesh("cpu", (2,)))
    holdfast.save(folder, state, step=1)
    return digests(state)


def _load_sharded(folder: str, model_type: str) -> dict[str, str]:
    mesh = init_device_mesh("cpu", (2,))
    state = trained(model_type, mesh)
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    holdfast.load(folder, state)
    return digests(state)


@pytest.mark.parametrize(
    "model_type",
    [EXPERTS[0], *(pytest.param(name, marks=pytest.mark.full) for name in (*EXPERTS[1:], *OTHERS))],
)
def test_two_ranks_save_what_one_process_saves_and_loads(tmp_path: Path, model_type: str) -> None:
    sharded = run_ranks(2, _save_sharded, str(tmp_path / "sharded"), model_type, deadline_s=DEADLINE_S)[0]
    state = trained(model_type)
    assert digests(state) == sharded, "the step is the same in both layouts"
    holdfast.save(tmp_path / "whole", state, step=1)
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "sharded" / file.name).read_bytes()
    records = [json.loads((tmp_path / name / "holdfast.json").read_text())["mappings"] for name in ("whole", "sharded")]
    assert records[0] == records[1] and records[0]["model"]
    with torch.no_grad():
        for tensor in (
            *state["model"].parameters(),
            *(t for s in state["optimizer"].state.values() for t in s.values()),
        ):
            tensor.zero_()
    holdfast.load(tmp_path / "sharded", state)
    assert digests(state) == sharded


@pytest.mark.full
def test_two_ranks_load_what_one_process_saved(tmp_path: Path) -> None:
    state = trained("qwen3_moe")
    holdfast.save(tmp_path / "whole", state, step=1)
    assert run_ranks(2, _load_sharded, str(tmp_path / "whole"), "qwen3_moe", deadline_s=DEADLINE_S)[1] == digests(state)
