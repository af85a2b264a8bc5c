"""Conversions shared by ranks, and DCP folders loaded in other layouts than they were saved in."""

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from holdfast.adapters.comm import current_ranks
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged
from tests.convert.states import tensor_files
from tests.dist.harness import run_ranks

SMALL: dict[str, Any] = {"block_bytes": 4096, "max_shard_size": 30_000}
STATEMENTS = ["up.weight^T -> up.kernel", "down.weight -> down.a, down.b, axis=1"]


class Feed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(64, 96)
        self.down = torch.nn.Linear(96, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def trained(seed=2):
    torch.manual_seed(seed)
    model = Feed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "a"
    model, optimizer = trained()
    holdfast.save(path, {"model": model, "optimizer": optimizer}, step=4, **SMALL)
    return path


def convert_on_rank(source, target, options):
    done = convert(source, target, options, current_ranks(60.0))
    return done.files


@pytest.mark.sliced(2)
@pytest.mark.parametrize("world", [2, 4])
def test_any_number_of_ranks_writes_the_same_bytes(source, tmp_path, world):
    options = ConvertOptions(mapping=MappingOptions(STATEMENTS), dtype="bfloat16", **SMALL)
    convert(source, tmp_path / "one", options)
    run_ranks(world, convert_on_rank, source, tmp_path / "many", options)
    assert len(tensor_files(tmp_path / "one")) > 3
    assert tensor_files(tmp_path / "many") == tensor_files(tmp_path / "one")
    one, many = holdfast.open(tmp_path / "one").manifest, holdfast.open(tmp_path / "many").manifest
    assert one.content() == many.content() and holdfast.open(tmp_path / "many").verify().good
    assert sorted(os.listdir(tmp_path)) == ["many", "one"]


def damaged_on_rank(source, target):
    try:
        convert(source, target, ConvertOptions(**SMALL), current_ranks(60.0))
    except Damaged as error:
        return str(error)
    return "no error"


def test_damage_that_one_rank_finds_is_the_error_of_all(source, tmp_path):
    import shutil

    copied = shutil.copytree(source, tmp_path / "a")
    place = holdfast.open(copied).places["model"]["up.weight"]
    data = bytearray((copied / place.file).read_bytes())
    data[place.end - 1] ^= 1
    (copied / place.file).write_bytes(data)
    answers = run_ranks(4, damaged_on_rank, copied, tmp_path / "b")
    assert len(set(answers)) == 1 and "up.weight" in answers[0] and "rank" in answers[0]
    assert os.listdir(tmp_path) == ["a"]


def torchrun(*arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(
        [*command, "-m", "holdfast", "convert", *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip


@pytest.mark.full
def test_torchrun_tells_errors_and_dry_runs_once(source, tmp_path):
    done = torchrun(source, tmp_path / "b", "--dry-run")
    assert done.returncode == 0 and done.stdout.count("would write") == 1
    done = torchrun(source, tmp_path / "b", "--only", "nothing")
    assert done.returncode and done.stderr.count("holdfast: no key, group or entry") == 1, done.stderr
    assert not (tmp_path / "b").exists()


@pytest.mark.full
def test_torchrun_shares_the_work(source, tmp_path):
    done = torchrun(source, tmp_path / "b", "--max-shard-size", "30kB")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote ") == 1
    assert tensor_files(tmp_path / "b") == tensor_files(source)


def sharded():
    """The model over FSDP2 x TP on 4 ranks, with an optimizer that has stepped on other values."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(77)
    model = parallelize_module(Feed(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.randn(4, 64)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def load_dcp(model, optimizer, path):
    weights, states = get_state_dict(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check(model, optimizer):
    expected_model, expected_optimizer = trained()
    expected = dict(expected_model.named_parameters())
    assert optimizer.param_groups[0]["lr"] == 0.02
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), expected[name].detach()), name
        for key, value in expected_optimizer.state[expected[name]].items():
            assert torch.equal(whole(optimizer.state[parameter][key]), value), (name, key)


def load_sharded(path):
    model, optimizer = sharded()
    load_dcp(model, optimizer, path)
    check(model, optimizer)


@pytest.mark.sliced(2)
@pytest.mark.parametrize("writers", [4, 1])
def test_dcp_loads_what_was_written_onto_fsdp_and_tp_and_onto_one_rank(source, tmp_path, writers):
    options = ConvertOptions(to="dcp")
    if writers == 1:
        convert(source, tmp_path / "d", options)
    else:
        run_ranks(writers, convert_on_rank, source, tmp_path / "d", options)
    names = sorted(name for name in os.listdir(tmp_path / "d") if name.endswith(".distcp"))
    assert names == [f"__{rank}_0.distcp" for rank in range(writers)]
    run_ranks(4, load_sharded, tmp_path / "d")
    model, optimizer = trained(seed=50)
    load_dcp(model, optimizer, tmp_path / "d")
    check(model, optimizer)


def save_sharded(path):
    model, optimizer = sharded()
    holdfast.save(path, {"model": model, "optimizer": optimizer}, **SMALL)
    expected = {name: whole(parameter.detach()).clone() for name, parameter in model.named_parameters()}
    dist.barrier()
    return {name: tensor.numpy().tobytes() for name, tensor in expected.items()}


@pytest.mark.full
def test_what_was_saved_from_fsdp_and_tp_goes_through_dcp(tmp_path):
    expected = run_ranks(4, save_sharded, tmp_path / "a")[0]
    convert(tmp_path / "a", tmp_path / "d", ConvertOptions(to="dcp"))
    model, optimizer = trained(seed=50)
    load_dcp(model, optimizer, tmp_path / "d")
    assert {name: p.detach().numpy().tobytes() for name, p in model.named_parameters()} == expected
