"""State on a GPU: the same bytes as on the CPU, and back onto the device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast.train.models.dropout import attention_grid, dropout_mask, feature_grid, sample_keys
from tests.dist.harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def build(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 70), nn.BatchNorm1d(70), nn.Linear(70, 9))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=device == "cuda")
    for index, parameter in enumerate(model.parameters()):
        moment = torch.full(parameter.shape, float(index))
        state = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment + 1}
        optimizer.state[parameter] = {name: value.to(device) for name, value in state.items()}
    odd = {
        "f8": torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "t": torch.arange(12.0).reshape(3, 4).t(),
    }
    return {"model": model, "optimizer": optimizer, "odd": {key: value.to(device) for key, value in odd.items()}}


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "safetensors" in path.name}


def test_the_bytes_are_those_of_the_cpu_and_load_back(tmp_path: Path) -> None:
    for device in ("cpu", "cuda"):
        holdfast.save(tmp_path / device, build(device), block_bytes=4096)
    assert tensor_files(tmp_path / "cuda") == tensor_files(tmp_path / "cpu")
    state, truth = build("cuda"), build("cuda")
    with torch.no_grad():
        for tensor in [*state["model"].state_dict().values(), *state["odd"].values()]:
            tensor.view(torch.uint8 if tensor.dtype == torch.float8_e4m3fn else tensor.dtype).zero_()
    state["optimizer"].state.clear()
    holdfast.load(tmp_path / "cpu", state)
    for key, value in truth["model"].state_dict().items():
        assert torch.equal(state["model"].state_dict()[key], value), key
    for parameter, other in zip(state["model"].parameters(), truth["model"].parameters(), strict=True):
        for name, value in truth["optimizer"].state[other].items():
            found = state["optimizer"].state[parameter][name]
            assert found.device == value.device and torch.equal(found, value), name
    state["optimizer"].step()


def _shards(path: str, spoil: bool) -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    full = torch.arange(7 * 5.0).reshape(7, 5)
    local = full.chunk(dist.get_world_size(), dim=0)[dist.get_rank()].cuda()
    replica = torch.ones(1000, device="cuda")
    if spoil and dist.get_rank() == 1:
        replica[777] += 1e-6
    shard = DTensor.from_local(local.cpu(), mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    try:
        holdfast.save(path, {"w": {"shard": shard, "replica": replica}})
    except holdfast.LayoutError as error:
        return str(error)
    return ""


def test_replicas_on_the_device_are_compared(tmp_path: Path) -> None:
    assert run_ranks(2, _shards, str(tmp_path / "a"), False) == ["", ""]
    said = run_ranks(2, _shards, str(tmp_path / "b"), True)
    assert said[0] == said[1] and "w: replica has different values" in said[0]


def _save_in_background(root: str, device: str) -> bool:
    """Two ranks on one GPU: shards of a file, changed by an optimizer right after the call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = "0"  # both ranks use the one device
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("x",))
    full = torch.arange(3000 * 257.0).reshape(3000, 257)
    local = full.chunk(world)[rank].contiguous().to(device)
    module: Any = nn.Module()
    shard = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())
    module.register_parameter("w", nn.Parameter(shard))
    optimizer = torch.optim.AdamW(module.parameters(), fused=device == "cuda")
    with holdfast.Checkpointer(root, block_bytes=1 << 16) as checkpointer:
        state = {"model": module, "optimizer": optimizer}
        checkpointer.restore(state)
        good = True
        for step in range(3):
            module.w.grad = torch.ones_like(module.w)
            optimizer.step()
            expected = module.w.to_local().detach().clone()
            handle = checkpointer.save(step, state)
            for _ in range(3):
                optimizer.step()
            stored = torch.from_numpy(handle.result(60).read("w")).chunk(world)[rank]
            good = good and torch.equal(stored, expected.cpu())
    return good


def test_two_ranks_on_one_gpu_share_a_file(tmp_path: Path) -> None:
    assert run_ranks(2, _save_in_background, str(tmp_path / "two"), "cuda") == [True, True]
    assert run_ranks(1, _save_in_background, str(tmp_path / "one"), "cuda") == [True]
    name = "step-000000000002"
    assert tensor_files(tmp_path / "two" / name) == tensor_files(tmp_path / "one" / name)


@pytest.mark.parametrize("make", [feature_grid, attention_grid])
def test_dropout_is_the_same_on_the_device(make: Any):
    masks = [
        dropout_mask(make(sample_keys(7, 3, 2**33, 8, device), 5, 16, 300), 0.1, "here") for device in ("cpu", "cuda")
    ]
    assert torch.equal(masks[0], masks[1].cpu())


def test_a_cpu_run_on_a_machine_with_a_gpu_starts_no_cuda(tmp_path: Path) -> None:
    """In a process of its own: a context would take memory of the GPU for nothing."""
    script = (
        "import sys, torch, holdfast\n"
        "with holdfast.Checkpointer(sys.argv[1]) as checkpointer:\n"
        "    checkpointer.restore({'w': torch.zeros(8)})\n"
        "    checkpointer.save(1, {'w': torch.ones(8)}).result(60)\n"
        "assert not torch.cuda.is_initialized()\n"
        "with holdfast.Checkpointer(sys.argv[1]) as checkpointer:\n"
        "    state = {'w': torch.zeros(8)}\n"
        "    assert checkpointer.restore(state) == 1\n"
        "    state['w'] = state['w'].cuda() + 1\n"
        "    checkpointer.save(2, state).result(60)\n"
        "found = {'w': torch.zeros(8)}\n"
        "holdfast.Checkpointer(sys.argv[1]).restore(found)\n"
        "assert found['w'].tolist() == [2.0] * 8\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "root")], check=True, timeout=120)


def test_a_fork_of_a_process_that_uses_cuda_can_save(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with holdfast.Checkpointer(tmp_path / "root") as checkpointer:
                checkpointer.save(1, {"w": torch.ones(8)}).result(60)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    found = {"w": torch.zeros(8)}
    with holdfast.Checkpointer(tmp_path / "root") as checkpointer:
        assert checkpointer.restore(found) == 1
    assert found["w"].tolist() == [1.0] * 8
