"""Planned sizes against real ones: files on disk, arenas of a Checkpointer, tensors that ranks hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.engine.options import SaveOptions
from holdfast.engine.rank_plan import prepared_arena_bytes
from holdfast.format.safetensors import encode_header
from tests.dist.harness import run_ranks
from tests.dist.layouts import LAYOUTS, Llama, local_tensors
from tests.merging.models import write

CUT: dict[str, Any] = {"block_bytes": 4096, "max_shard_size": 30_000}
OPTIONS = SaveOptions(**CUT)
SHAPES: dict[str, dict[str, Any]] = {
    "single": {},
    "ddp-2": {"dp": 2},
    "fsdp-2": {"dp": 2, "zero": 3},
    "fsdp-3": {"dp": 3, "zero": 3},
    "fsdp-4": {"dp": 4, "zero": 3},
    "tp-2": {"tp": 2},
    "tp-4": {"tp": 4},
    "fsdp-tp-2x2": {"dp": 2, "tp": 2, "zero": 3},
    "pipeline-3": {"pp": 3},
    "flat-zero1-2": {"dp": 2, "zero": 1},
    "flat-zero1-3": {"dp": 3, "zero": 1},
}
QUICK = (("fsdp-2", True),)


def on_disk(folder: Path, group: str = "") -> int:
    """The bytes of the tensor files and indexes in a folder."""
    return sum(file.stat().st_size for file in folder.glob(f"{group}*.safetensors*"))


def _measure(layout: str, tied: bool, root: str) -> dict[str, int]:
    """Save as a run does; what this rank planned, allocated and holds."""
    held = LAYOUTS[layout][1]("truth", tied)
    events: list[holdfast.Event] = []
    with holdfast.Checkpointer(root, ties=held.ties, on_event=events.append, **CUT) as checkpointer:
        checkpointer.save(1, held.state).result()
    planned = [event.bytes for event in events if event.name == "planned" and event.bytes]
    own = local_tensors(held)
    keys = held.state["model"].state_dict().keys()
    sizes = {label: tensor.numel() * tensor.element_size() for label, tensor in own.items()}
    seen: set[int] = set()  # tied weights
    parameters = 0
    for key in keys:
        if own[key].data_ptr() not in seen or not own[key].numel():
            parameters += sizes[key]
        seen.add(own[key].data_ptr())
    optimizer = sum(size for label, size in sizes.items() if label not in keys and not label.endswith("/step"))
    return {"arena": planned[-1], "parameters": parameters, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(name, tied, marks=() if (name, tied) in QUICK else pytest.mark.full)
        for name in SHAPES
        for tied in (True, False)
    ],
)
def test_sizes_of_a_run_are_those_of_real_ranks(layout: str, tied: bool, tmp_path: Path) -> None:
    measured = run_ranks(LAYOUTS[layout][0], _measure, layout, tied, str(tmp_path))
    plan = holdfast.plan_memory(Llama(tied=tied), optim="adamw", **SHAPES[layout], **CUT)
    assert plan.checkpoint.bytes == on_disk(next(tmp_path.glob("step-*")))
    for rank, found in zip(plan.ranks, measured, strict=True):
        assert rank.arena_bytes == prepared_arena_bytes(found["arena"], OPTIONS), rank
        assert (rank.parameters, rank.optimizer) == (found["parameters"], found["optimizer"]), rank


def test_the_arena_is_the_one_that_prepare_allocates(tmp_path: Path) -> None:
    held = LAYOUTS["single"][1]("truth", True)
    events: list[holdfast.Event] = []
    with holdfast.Checkpointer(tmp_path, on_event=events.append, **CUT) as checkpointer:
        checkpointer.prepare(held.state)
        checkpointer.save(1, held.state).result()
    allocated = [event.bytes for event in events if event.name == "arena"]
    plan = holdfast.plan_memory(Llama(tied=True), optim="adamw", **CUT)
    assert [plan.ranks[0].arena_bytes] == allocated


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_checkpoint_bytes_of_a_model(dtype: str, tmp_path: Path) -> None:
    model = Llama(tied=False).to(getattr(torch, dtype))
    holdfast.save(tmp_path / "made", {"model": model}, **CUT)
    plan = holdfast.plan_memory(model, **CUT)
    assert plan.checkpoint.bytes == on_disk(tmp_path / "made")
    again = holdfast.plan_memory(tmp_path / "made", dp=2, zero=3, **CUT)  # any mesh writes the same bytes
    assert again.checkpoint.bytes == on_disk(tmp_path / "made")
    assert again.stored["model"] == sum(t.numel() * t.element_size() for t in model.state_dict().values())


def test_rounded_models_have_masters(tmp_path: Path) -> None:
    model = Llama(tied=False)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    holdfast.save(tmp_path / "made", {"model": model, "optimizer": optimizer}, model_dtype="bfloat16", **CUT)
    plan = holdfast.plan_memory(model, optim="adamw", model_dtype="bfloat16", **CUT)
    sizes = {group.name: group.file_bytes for group in plan.checkpoint.groups}
    assert sizes == {name: on_disk(tmp_path / "made", name) for name in ("model", "master_weights", "optimizer")}
    assert plan.ranks[0].masters == 0  # the parameters themselves


def _quantized(kind: str) -> dict[str, Any]:
    """Tensors as quantized checkpoints store them, as torch has them."""
    tensors: dict[str, Any] = {"model.norm.weight": torch.ones(64), "model.layers.0.q_proj.bias": torch.ones(96)}
    weight = "model.layers.0.q_proj.weight"
    if kind == "fp8":
        tensors[weight] = torch.ones(96, 64).to(torch.float8_e4m3fn)
        tensors[f"{weight}_scale_inv"] = torch.ones(1, 1)
    elif kind == "fp4":
        tensors[weight] = torch.ones(96, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
        tensors[f"{weight}_scale"] = torch.ones(96, 4, dtype=torch.float8_e4m3fn)
    else:
        tensors["model.layers.0.q_proj.qweight"] = torch.ones(8, 96, dtype=torch.int32)
        tensors["model.layers.0.q_proj.scales"] = torch.ones(1, 96, dtype=torch.float16)
        tensors["model.layers.0.q_proj.qzeros"] = torch.ones(1, 12, dtype=torch.int32)
    return tensors


class Stored(torch.nn.Module):
    """A module whose state_dict has given tensors: parameters where these are floats, else buffers."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        super().__init__()
        for key, tensor in tensors.items():
            *path, name = key.split(".")
            inner: torch.nn.Module = self
            for part in path:
                if not hasattr(inner, part):
                    inner.add_module(part, torch.nn.Module())
                inner = getattr(inner, part)
            if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
                inner.register_parameter(name, torch.nn.Parameter(tensor))
            else:
                inner.register_buffer(name, tensor)


@pytest.mark.parametrize("kind", ["fp8", "fp4", "gptq"])
def test_checkpoint_bytes_of_quantized_weights(kind: str, tmp_path: Path) -> None:
    module = Stored(_quantized(kind))
    holdfast.save(tmp_path / "made", {"model": module}, **CUT)
    assert holdfast.plan_memory(module, **CUT).checkpoint.bytes == on_disk(tmp_path / "made")
    plan = holdfast.plan_memory(tmp_path / "made", dp=2, tp=2, zero=3, **CUT)
    assert plan.checkpoint.bytes == on_disk(tmp_path / "made")
    trained = holdfast.plan_memory(tmp_path / "made", optim="adamw", **CUT)
    assert trained.ranks[0].optimizer == 2 * 4 * (64 + 96)  # quantized weights and their scales are not trained
    assert any("quantized" in note for note in trained.notes)
    cast = holdfast.plan_memory(tmp_path / "made", param="bf16", **CUT)
    assert plan.checkpoint.groups[0].tensor_bytes - cast.checkpoint.groups[0].tensor_bytes == 2 * (64 + 96)


def test_a_folder_of_another_tool(tmp_path: Path) -> None:
    values = np.ones((6, 4), ml_dtypes.bfloat16)
    from holdfast.format.dtypes import dtype_named
    from holdfast.format.safetensors import TensorEntry

    header = encode_header([TensorEntry("lm_head.weight", dtype_named("bfloat16"), (6, 4), 0, values.nbytes)])
    (tmp_path / "model.safetensors").write_bytes(header + values.tobytes())
    plan = holdfast.plan_memory(tmp_path, tp=3)
    assert plan.stored == {"model": values.nbytes}
    assert [rank.parameters for rank in plan.ranks] == [16, 16, 16]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_that_a_folder_leaves_out_is_on_the_last_stage_too(family: str, tied: bool, tmp_path: Path) -> None:
    write(tmp_path / "whole", family, tied=tied)
    (tmp_path / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    stored, built = (holdfast.plan_memory(source, pp=2) for source in (tmp_path / "whole", tmp_path / "config.json"))
    assert [rank.parameters for rank in stored.ranks] == [rank.parameters for rank in built.ranks]


def test_stages_and_their_layers() -> None:
    plan = holdfast.plan_memory(Llama(tied=True), pp=3, dp=2, optim="sgd-momentum", grads="bf16")
    first, last = plan.ranks[0], plan.ranks[-1]
    embedding = 101 * 24
    layer = 24 * 24 * 2 + 24 + 53 * 24 * 2 + 24 + 24
    assert first.parameters == 4 * (embedding + layer) + 4
    assert last.parameters == 4 * (embedding + layer + 24) + 4  # the tied head is a copy of the embedding
    assert first.gradients == 2 * (embedding + layer)
    assert first.optimizer == 4 * (embedding + layer)
    assert plan.most in (plan.ranks[4], last)


def test_masters_and_copies() -> None:
    module = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(256, 512, bias=False, device="meta")})
    count = 256 * 512
    plan = holdfast.plan_memory(module, param="bf16", compute="fp8-block128", grads="fp32", optim="adamw")
    rank = plan.ranks[0]
    assert (rank.parameters, rank.gradients, rank.masters, rank.optimizer) == (
        2 * count,
        4 * count,
        4 * count,
        8 * count,
    )
    assert rank.copies == count + 4 * 2 * 4
    assert rank.device_bytes == 19 * count + 32
    packed = holdfast.plan_memory(module, param="bf16", compute="mxfp4", optim="adamw", masters="none").ranks[0]
    assert packed.copies == count // 2 + count // 32
    assert (packed.masters, packed.gradients, packed.optimizer) == (0, 2 * count, 4 * count)


def test_arenas_of_large_runs_are_planned_for_a_rank_of_each_stage() -> None:
    plan = holdfast.plan_memory(Llama(tied=False), dp=64, pp=2, zero=3, optim="adamw", ranks_per_host=4)
    planned = [rank.rank for rank in plan.ranks if rank.arena_bytes is not None]
    assert planned == [0, 64]
    assert "arenas were planned for 2 of 128 ranks" in plan.notes
    chosen = holdfast.plan_memory(Llama(tied=False), dp=4, ranks=[2])
    assert [rank.arena_bytes is None for rank in chosen.ranks] == [True, True, False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero": 4}, "choose 0, 1, 2 or 3"),
        ({"tp": 0}, "tp=0: every axis needs at least 1 rank"),
        ({"dp": 3, "ep": 2}, "ep=2 does not divide the 3 data-parallel ranks"),
        ({"dp": 2, "ep": 2}, "ep=2, but the model has no experts"),
        ({"pp": 4}, "3 layers are too few for pp=4"),
        ({"param": "fp8"}, "param='fp8': choose one of fp64, fp32, bf16, fp16"),
        ({"compute": "fp7"}, "compute='fp7': choose one of"),
        ({"optim": "shampoo"}, "optim='shampoo': choose one of none, adamw"),
        ({"masters": "fp32"}, "belong to an optimizer"),
        ({"dp": 2, "ranks": [2]}, "this run has the ranks 0 to 1"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message.replace("(", r"\(")):
        holdfast.plan_memory(Llama(tied=False), **options)


def test_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file or folder"):
        holdfast.plan_memory(tmp_path / "missing")
    with pytest.raises(InvalidArgument, match="give a path or a module"):
        holdfast.plan_memory(3)


@pytest.mark.parametrize("kind", ["config", "checkpoint", "module"])
@pytest.mark.parametrize(("tp", "expected"), [(1, []), (2, []), (4, ["2 key"]), (3, ["4 attention", "2 key"])])
def test_heads_that_do_not_divide_are_noted(tmp_path: Path, kind: str, tp: int, expected: list[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 48, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 1}
    model: Any = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    model.save_pretrained(tmp_path)
    source: Any = {"config": tmp_path / "config.json", "checkpoint": tmp_path, "module": model}[kind]
    notes = [note for note in holdfast.plan_memory(source, tp=tp).notes if "heads do not divide" in note]
    assert [" ".join(note.split()[:2]) for note in notes] == expected
    assert all(f"by tp={tp}" in note for note in notes)
