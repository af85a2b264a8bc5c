"""Parts of models that look like whole ones: DeepSpeed's, Megatron's, FSDP's, and those of ranks of one's own."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.sources import open_stored

TOOLS = "DeepSpeed.*zero_to_fp32.py.*universal"


def refused(path: Path, match: str) -> None:
    """A file or folder that nothing opens, and that is not converted."""
    with pytest.raises(Unsupported, match=match):
        open_stored(path)
    with pytest.raises(HoldfastError, match=match):
        convert(path, path.parent.parent / "out", ConvertOptions(to="hf"))


def marked(path: Path, match: str) -> None:
    """A file or folder that can be opened, says that it is a part, and is not converted."""
    assert any(match in note for note in open_stored(path).notes)
    for form in ("hf", "holdfast", "paddle"):
        with pytest.raises(Unsupported, match=match):
            convert(path, path.parent.parent / "out", ConvertOptions(to=form))


def zero_model(empty: bool, world: int = 1) -> dict[str, Any]:
    """A model file as DeepSpeed 0.19 lays it out."""
    shapes = OrderedDict([("0.weight", torch.Size([16, 8])), ("0.bias", torch.Size([16]))])
    module = OrderedDict((key, torch.zeros(0) if empty else torch.ones(shape)) for key, shape in shapes.items())
    return {
        "module": module, "buffer_names": [], "optimizer": None, "param_shapes": [shapes], "frozen_param_shapes": None,
        "shared_params": {}, "lr_scheduler": None, "global_steps": 1, "dp_world_size": 2, "mp_world_size": world,
        "ds_config": {"zero_optimization": {"stage": 3}}, "ds_version": "0.19.8",
    }  # fmt: skip


def write(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt", "mine.pt"])
def test_a_model_file_of_zero_3_is_refused_by_name(tmp_path: Path, name: str) -> None:
    refused(write(tmp_path / "step" / name, zero_model(empty=True)), TOOLS)


def test_a_model_file_of_zero_1_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "step" / "mp_rank_00_model_states.pt", zero_model(empty=False))
    assert set(open_stored(path).keys("model")) == {"0.weight", "0.bias"}
    convert(path, tmp_path / "out", ConvertOptions(to="hf"))


def test_a_tensor_parallel_model_file_of_deepspeed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "step" / "mp_rank_00_model_states.pt", zero_model(empty=False, world=2))
    refused(path, "DeepSpeed file with one of 2 tensor-parallel shards")


@pytest.mark.parametrize("prefix", ["", "bf16_"])
def test_an_optimizer_file_of_zero_is_refused_by_name(tmp_path: Path, prefix: str) -> None:
    state: dict[str, Any] = {
        "optimizer_state_dict": {"zero_stage": 3, "partition_count": 2, "fp32_flat_groups": [torch.ones(5)]}
    }
    state |= {"ds_config": {}, "ds_version": "0.19.8"}
    refused(write(tmp_path / "step" / f"{prefix}zero_pp_rank_0_mp_rank_00_optim_states.pt", state), TOOLS)
    refused(write(tmp_path / "step" / "other.pt", state), TOOLS)


def test_folders_of_deepspeed_are_refused_by_name(tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step2"
    for rank in range(2):
        write(step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", zero_model(empty=True))
        write(step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"x": torch.ones(2)})
    (tmp_path / "run" / "latest").write_text("global_step2")
    refused(step, TOOLS)
    refused(tmp_path / "run", TOOLS)


def test_a_folder_of_zero_1_says_where_its_weights_are(tmp_path: Path) -> None:
    write(tmp_path / "run" / "mp_rank_00_model_states.pt", zero_model(empty=False))
    write(tmp_path / "run" / "zero_pp_rank_0_mp_rank_00_optim_states.pt", {"x": torch.ones(2)})
    refused(tmp_path / "run", r"DeepSpeed.*can be read from mp_rank_00_model_states\.pt")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_model_that_was_saved_empty_under_zero_3_is_refused(tmp_path: Path, kind: str) -> None:
    tensors = {f"{n}.weight": torch.zeros(0) for n in range(3)} | {"norm.weight": torch.ones(4)}
    (tmp_path / "m").mkdir()
    if kind == "bin":
        torch.save(tensors, tmp_path / "m" / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "m" / "model.safetensors")
    refused(tmp_path / "m", TOOLS)


def test_a_model_with_an_empty_buffer_is_a_model(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.ones(2), "b.weight": torch.ones(2), "cache": torch.zeros(0)}, tmp_path / "m.safetensors"
    )
    assert len(open_stored(tmp_path / "m.safetensors").keys()) == 3


def megatron(tp: int, pp: int = 1) -> dict[str, Any]:
    options = argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    model = {"language_model": {"embedding": {"word_embeddings.weight": torch.ones(4, 2)}}}
    return {"args": options, "checkpoint_version": 3.0, "iteration": 5, "model": model}


def test_a_rank_of_megatron_is_a_part(tmp_path: Path) -> None:
    marked(
        write(tmp_path / "iter" / "mp_rank_00" / "model_optim_rng.pt", megatron(2)), "tensor_model_parallel_size is 2"
    )
    marked(tmp_path / "iter" / "mp_rank_00", "Megatron")
    refused(tmp_path / "iter", "Megatron checkpoint with the shards of ranks in mp_rank_00")


def test_a_rank_of_megatron_without_options_is_a_part_by_its_neighbours(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / "iter" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", {"model": {"w": torch.ones(2)}})
    marked(tmp_path / "iter" / "mp_rank_01", "one of 2 Megatron ranks")
    marked(tmp_path / "iter" / "mp_rank_01" / "model_optim_rng.pt", "one of 2 Megatron ranks")


def test_megatron_without_model_parallelism_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path / "iter" / "mp_rank_00" / "model_optim_rng.pt", megatron(1))
    assert open_stored(path).step == 5
    convert(path, tmp_path / "out", ConvertOptions())


@pytest.mark.parametrize("key", ["_flat_param", "layers.0._fsdp_wrapped_module._flat_param", "flat_param_0"])
def test_a_flat_parameter_of_fsdp_is_a_part(tmp_path: Path, key: str) -> None:
    marked(write(tmp_path / "a" / "m.pt", {"model": {key: torch.ones(7)}}), "one FSDP rank")
    marked(write(tmp_path / "a" / "n.pt", {key: torch.ones(7)}), "one FSDP rank")


def test_a_sharded_tensor_of_fsdp_is_refused(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard = Shard.from_tensor_and_offsets(torch.ones(2, 3), [0, 0], 0)
        path = write(tmp_path / "a" / "m.pt", {"w": init_from_local_shards([shard], 2, 3)})
    finally:
        dist.destroy_process_group()
    refused(path, "ShardedTensor of FSDP")


@pytest.mark.parametrize(
    "names",
    [("consolidated.00.pth", "consolidated.01.pth"), ("model_rank_0.pt", "model_rank_1.pt"),
     ("tp0.safetensors", "tp1.safetensors"), ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"),
     ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")],
)  # fmt: skip
def test_one_of_several_ranks_files_is_a_part(tmp_path: Path, names: tuple[str, str]) -> None:
    for number, name in enumerate(names):
        tensors = {f"{number}.weight": torch.ones(2)}
        (tmp_path / "a").mkdir(exist_ok=True)
        save_file(tensors, tmp_path / "a" / name) if "safetensors" in name else torch.save(
            tensors, tmp_path / "a" / name
        )
    marked(tmp_path / "a" / names[0], "a model")


def test_a_file_with_a_number_and_no_neighbour_is_whole(tmp_path: Path) -> None:
    for name in ("consolidated.00.pth", "step_100.pt", "step_200.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
        convert(tmp_path / name, tmp_path / f"{name}.out", ConvertOptions(to="hf"))
        assert open_stored(tmp_path / f"{name}.out").read("w").tolist() == [1, 1]


def test_a_part_can_be_loaded_by_its_rank(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path / "a" / f"rank{rank}.pt", {"weight": torch.full((2, 2), float(rank)), "bias": torch.ones(2)})
    model = torch.nn.Linear(2, 2)
    report = holdfast.load(tmp_path / "a" / "rank1.pt", {"model": model})
    assert model.weight[0, 0] == 1 and any("differ in a rank number" in note for note in report.notes)


def test_a_folder_of_fsdp_trainers_says_which_folder_to_name(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / ".metadata").write_bytes(b"")
    write(tmp_path / "a" / "scheduler.bin", {"last_epoch": 1})
    write(tmp_path / "a" / "random_states_0.pkl", {"step": 1})
    refused(tmp_path / "a", "it contains the torch DCP folders optimizer_0, pytorch_model_fsdp_0")


def test_a_checkpoint_of_lightning_is_whole(tmp_path: Path) -> None:
    state = {"state_dict": {"w": torch.ones(2)}, "epoch": 1, "global_step": 7, "optimizer_states": [], "loops": {}}
    opened = open_stored(write(tmp_path / "a" / "last.ckpt", state))
    assert opened.step == 7 and set(opened.keys("model")) == {"w"}
