"""Checkpoints of torch.distributed.checkpoint: plain, flattened, and as Megatron lays them out."""

from __future__ import annotations

import argparse
import enum
import pickle
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.sources import open_stored
from tests.sources.made import megatron_class, save_dcp, torch_file, trained


def moments(model, optimizer) -> dict[str, torch.Tensor]:
    names = {param: name for name, param in model.named_parameters()}
    return {f"{names[p]}/{n}": v for p, states in optimizer.state.items() for n, v in states.items()}


def same(found, group: str, tensors: Mapping[str, Any]) -> None:
    assert set(found.keys(group)) == set(tensors)
    for key, tensor in tensors.items():
        assert np.array_equal(found.read(key, group), tensor.detach().numpy()), key


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_model_optimizer_and_values(tmp_path, flat, wrapped):
    model, optimizer = trained(tied=False)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 9, "list": [1, torch.ones(2), {"x": None}]}
    found: Any = open_stored(save_dcp(tmp_path / "c", {"app": state} if wrapped else state))
    assert (found.format, found.step, found.notes) == ("torch DCP", 9, ())
    same(found, "model", model_state)
    same(found, "optimizer", moments(model, optimizer))
    assert found.state["optimizer"]["groups"][0]["options"]["lr"] == 0.125
    assert sorted(found.state["optimizer"]["groups"][0]["params"]) == sorted(n for n, _ in model.named_parameters())
    assert found.read("1", "list").tolist() == [1, 1]


@pytest.mark.parametrize("flat", [False, True])
def test_it_is_loaded_into_live_objects(tmp_path, flat):
    model, optimizer = trained(tied=False)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    save_dcp(tmp_path / "c", state)
    live, live_optimizer = trained(seed=1, tied=False)
    live_optimizer.param_groups[0]["lr"] = 7.0
    holdfast.load(tmp_path / "c", {"model": live, "optimizer": live_optimizer})
    for key, tensor in model.state_dict().items():
        assert torch.equal(live.state_dict()[key], tensor), key
    for key, tensor in moments(model, optimizer).items():
        assert torch.equal(moments(live, live_optimizer)[key], tensor), key
    assert live_optimizer.param_groups[0]["lr"] == 0.125


def test_a_flat_model_beside_an_optimizer(tmp_path):
    """As torchtitan saves: the model's keys at the top."""
    model, optimizer = trained(tied=False)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    found = open_stored(
        save_dcp(tmp_path / "c", {**model_state, "optimizer": optimizer_state, "train_state": {"n": 1}})
    )
    same(found, "model", model_state)
    same(found, "optimizer", moments(model, optimizer))
    assert found.value("train_state") == {"n": 1}


def test_numbered_parameters_are_those_of_the_live_optimizer(tmp_path):
    model, _ = trained(tied=False)
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())))
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
    save_dcp(tmp_path / "c", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    assert "0/exp_avg" in open_stored(tmp_path / "c").keys("optimizer")
    live, _ = trained(seed=1, tied=False)
    live_optimizer = torch.optim.AdamW(reversed(list(live.parameters())))
    holdfast.load(tmp_path / "c", {"model": live, "optimizer": live_optimizer})
    for key, tensor in moments(model, optimizer).items():
        assert torch.equal(moments(live, live_optimizer)[key], tensor), key


def test_odd_tensors(tmp_path):
    tensors = {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "bf16": torch.arange(5).bfloat16(),
        "complex": torch.full((2,), 1 + 2j, dtype=torch.complex128),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "bool": torch.tensor([True, False]),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
    }
    found = open_stored(save_dcp(tmp_path / "c", {"model": tensors}))
    for key, tensor in tensors.items():
        array = found.read(key)
        assert array.shape == tuple(tensor.shape), key
        expected = tensor.to(torch.complex128).numpy() if key == "complex" else tensor.double().numpy()
        assert np.array_equal(array.astype(expected.dtype), expected), key


def megatron(folder: Path) -> dict[str, torch.Tensor]:
    """Layers stacked in front, state names before keys, options in common.pt."""
    torch.manual_seed(0)
    keys = {"embedding.word_embeddings.weight": (8, 4), "decoder.layers.self_attention.linear_qkv.weight": (3, 12, 4)}
    state: dict[str, torch.Tensor] = {}
    for key, shape in keys.items():
        state[key] = torch.randn(shape).bfloat16()
        for name in ("exp_avg", "exp_avg_sq", "fp32_param"):
            state[f"chained_0.optimizer.state.{name}.{key}"] = torch.randn(shape)
    save_dcp(folder, state)
    common = {
        "args": argparse.Namespace(tensor_model_parallel_size=2, lr=0.1),
        "iteration": 40,
        "checkpoint_version": 3.0,
    }
    (folder / "common.pt").write_bytes(torch_file(common))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return state


def test_megatron_torch_dist(tmp_path):
    state = megatron(tmp_path / "iter_0000040")
    found = open_stored(tmp_path / "iter_0000040")
    assert (found.groups, found.step, found.contents.tp_degree) == (("model", "optimizer", "master_weights"), 40, 2)
    assert found.value("checkpoint_version") == 3.0
    for key, tensor in state.items():
        group, name, rest = "model", "", key
        if "optimizer.state." in key:
            name, _, rest = key.partition("optimizer.state.")[2].partition(".")
            group = "master_weights" if name == "fp32_param" else "optimizer"
        kept = f"{rest}/{name}" if group == "optimizer" else rest
        assert np.array_equal(found.read(kept, group).astype(np.float32), tensor.float().numpy()), key


def test_newer_megatron_keeps_plans_in_the_metadata_and_its_values_beside_the_tensors(tmp_path, monkeypatch):
    """As Megatron-Core writes: plans of the save since 0.11, no common.pt since 0.19."""
    model_type = megatron_class(monkeypatch, "megatron.core.enums", enum.Enum("ModelType", {"encoder_or_decoder": 1}))
    recipe = megatron_class(monkeypatch, "megatron.core.enums", enum.Enum("Fp8Recipe", {"delayed": "delayed"}))
    args = argparse.Namespace(
        tensor_model_parallel_size=2, model_type=model_type(1), fp8_recipe=recipe("delayed"), exit_signal=signal.SIGTERM
    )
    key, layer = "decoder.layers.self_attention.linear_qkv.weight", "decoder.layers.self_attention.linear_qkv"
    state: dict[str, Any] = {key: torch.randn(3, 12, 4), "common_state/shard_0_1": [{"args": args, "iteration": 40}]}
    state |= {f"{layer}._extra_state/shard_{n}_3": torch.ones(5, dtype=torch.uint8) for n in range(3)}
    folder = tmp_path / "iter_0000040"
    save_dcp(folder, state, planner=DefaultSavePlanner(flatten_state_dict=False))
    plan_class = megatron_class(
        monkeypatch, "megatron.core.dist_checkpointing.strategies.torch", type("MCoreSavePlan", (SavePlan,), {})
    )
    top_class = megatron_class(
        monkeypatch, "megatron.core.dist_checkpointing.strategies.torch", type("MCoreMetadata", (), {})
    )

    def as_megatron(top):
        index = dcp_metadata.MetadataIndex(key, torch.Size([0, 0, 0]))
        plan = SavePlan([WriteItem(index, WriteItemType.SHARD)])
        new = top_class()
        new.__dict__.update(top.__dict__, all_local_plans=[plan, plan_class([])])
        return new

    rewrite(folder, as_megatron)
    found = open_stored(folder)
    assert (found.groups, found.step, found.contents.tp_degree) == (("model",), 40, 2)
    assert list(found.keys()) == [key]
    assert found.value("args") == {
        "tensor_model_parallel_size": 2, "model_type": "ModelType(1)", "fp8_recipe": "delayed",
        "exit_signal": "Signals(15)",
    }  # fmt: skip
    assert any("3 _extra_state of Megatron's layers" in note for note in found.notes)


def test_options_of_megatrons_optimizer_name_no_parameters_and_a_note_says_so(tmp_path):
    key = "decoder.final_layernorm.weight"
    folder = save_dcp(tmp_path / "a", {key: torch.ones(4), f"optimizer.state.exp_avg.{key}": torch.ones(4)})
    group = {"lr": 1e-4, "betas": (0.9, 0.95), "step": 100}
    one = {"optimizer": {"param_groups": [group]}}
    for stored, count in ((one, 1), ({0: one, 1: one}, 2), ({"optimizer": {}}, 0), (None, 0)):
        (folder / "common.pt").write_bytes(torch_file({"optimizer": stored, "iteration": 100}))
        found = open_stored(folder)
        assert found.contents.state["optimizer"]["groups"] == []
        said = [note for note in found.notes if "param groups" in note]
        assert len(said) == (count > 0)
        assert not said or (f"{count} param groups" in said[0] and "(lr, betas, step)" in said[0])


@pytest.mark.parametrize("prefix", ["", "chained_0."])
def test_buffers_of_megatrons_distributed_optimizer_are_no_weights(tmp_path, prefix):
    """As Megatron-Core saves it unless told to save by parameter."""
    bucket = f"{prefix}optimizer.distributed.dp_group_idx_0"
    state: dict[str, Any] = {
        f"{bucket}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.{name}": torch.ones(9)
        for name in ("param", "exp_avg", "exp_avg_sq")
    }
    state |= {"embedding.word_embeddings.weight": torch.ones(4, 2), f"{bucket}.per_bucket_numel/shard_0_1": "x"}
    save_dcp(tmp_path / "c", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    found = open_stored(tmp_path / "c")
    assert list(found.keys()) == ["embedding.word_embeddings.weight"] and not found.state
    assert any("left out: 4 buffers of Megatron's distributed optimizer" in note for note in found.notes)


def flattened(folder: Path, shape=(4, 6), grid=(2, 2)) -> np.ndarray:
    """A tensor whose parts were flattened and cut among ranks, as the distributed optimizer of Megatron writes it."""
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    cell = tuple(n // g for n, g in zip(shape, grid, strict=True))
    volume = int(np.prod(cell))
    data, chunks, places = b"", [], {}
    for index in np.ndindex(*grid):
        part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, cell, strict=True))].ravel()
        for begin, stop in ((0, 4), (4, volume)):
            item = torch_file(torch.from_numpy(part[begin:stop].copy()).reshape(*(1,) * len(grid), -1))
            offsets = (*index, begin)
            sizes = torch.Size((*(1,) * len(grid), stop - begin))
            chunks.append(dcp_metadata.ChunkStorageMetadata(torch.Size(offsets), sizes))
            places[dcp_metadata.MetadataIndex("k", offsets)] = _StorageInfo("__0_0.distcp", len(data), len(item))
            data += item
    entry = dcp_metadata.TensorStorageMetadata(dcp_metadata.TensorProperties(), torch.Size((*grid, volume)), chunks)
    top: Any = dcp_metadata.Metadata({"k": entry}, None, places)
    top.mcore_data = {"k": {"nd_reformulated_orig_global_shape": shape}}
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(top))
    (folder / "__0_0.distcp").write_bytes(data)
    return array


@pytest.mark.parametrize(("shape", "grid"), [((4, 6), (2, 2)), ((6, 2, 3), (3, 1, 1)), ((12,), (2,))])
def test_parts_that_megatron_flattened_have_their_shape_again(tmp_path, shape, grid):
    array = flattened(tmp_path / "c", shape, grid)
    assert np.array_equal(open_stored(tmp_path / "c").read("k"), array)


def rewrite(folder: Path, change) -> None:
    top = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(top) or top))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda top: top.state_dict_metadata["w"].chunks.clear(), "do not cover"),
        (lambda top: top.storage_data.clear(), "in no file"),
        (lambda top: setattr(top.state_dict_metadata["w"], "size", torch.Size([9])), "do not cover"),
        (lambda top: setattr(top.state_dict_metadata["w"], "size", torch.Size([2])), "outside that shape"),
        (lambda top: setattr(top.state_dict_metadata["w"].properties, "dtype", torch.float64), "the metadata says"),
        (lambda top: _place(top, relative_path="../x"), "not an allowed file name"),
        (lambda top: _place(top, relative_path="__9_9.distcp"), "which is missing"),
        (lambda top: _place(top, offset=10**9), "ends beyond"),
        (lambda top: _place(top, length=100), "."),
        (lambda top: _place(top, transform_descriptors=["zstd"]), "was written with the transform"),
        (lambda top: setattr(top, "storage_data", [1]), "storage_data is not a dict"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path, change, says):
    save_dcp(tmp_path / "c", {"w": torch.ones(4)})
    rewrite(tmp_path / "c", change)
    with pytest.raises(HoldfastError, match=says):
        open_stored(tmp_path / "c")


def _place(top, **fields) -> None:
    for info in top.storage_data.values():
        for name, value in fields.items():
            setattr(info, name, value)


def test_a_value_that_is_not_read_is_left_out_and_said(tmp_path):
    found = open_stored(save_dcp(tmp_path / "c", {"w": torch.ones(4), "odd": argparse.ArgumentParser}))
    assert "argparse.ArgumentParser" in found.notes[0] and "odd" not in found.state


def test_a_cut_file_is_refused(tmp_path):
    save_dcp(tmp_path / "c", {"w": torch.ones(400)})
    file = next((tmp_path / "c").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Damaged):
        open_stored(tmp_path / "c")


def test_an_item_of_another_layout_is_not_taken_for_a_known_one(tmp_path):
    """Items of one length whose beginnings differ are read each on its own."""
    tensors = {f"w{n}": torch.full((64,), float(n), dtype=torch.float32) for n in range(5)}
    tensors |= {f"h{n}": torch.full((128,), float(n), dtype=torch.float16) for n in range(5)}
    found = open_stored(save_dcp(tmp_path / "c", {"model": tensors}))
    for key, tensor in tensors.items():
        assert np.array_equal(found.read(key), tensor.numpy())


def test_unsupported_dtypes_are_refused_by_name(tmp_path):
    save_dcp(tmp_path / "c", {"w": torch.ones(4)})
    rewrite(tmp_path / "c", lambda top: setattr(top.state_dict_metadata["w"].properties, "dtype", torch.qint8))
    with pytest.raises(Unsupported, match=r"torch\.qint8"):
        open_stored(tmp_path / "c")


def _stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _at_root(form: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    weights = get_model_state_dict(model)
    nested = get_optimizer_state_dict(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    of_states = {(key, name): value for key, own in nested["state"].items() for name, value in own.items()}
    return {
        "flat": {**weights, **flat},
        "nested": {**weights, **nested},
        "beside a named model": {"model": weights, **flat},
        "prefixed": {**{f"model.{key}": value for key, value in weights.items()}, **flat},
        "dotted": {**weights, **{f"{key}.{name}": value for (key, name), value in of_states.items()}},
        "slashed": {**weights, **{f"{key}/{name}": value for (key, name), value in of_states.items()}},
    }[form]


@pytest.mark.parametrize("form", ["flat", "nested", "beside a named model", "prefixed", "dotted", "slashed"])
def test_optimizer_state_at_the_root_is_no_part_of_the_model(tmp_path, form):
    model, optimizer = _stepped()
    save_dcp(tmp_path / "dcp", _at_root(form, model, optimizer))
    opened = open_stored(tmp_path / "dcp")
    assert set(opened.keys("model")) == set(model.state_dict()) and set(opened.groups) == {"model", "optimizer"}
    for key, parameter in model.named_parameters():
        for name, value in optimizer.state[parameter].items():
            assert np.array_equal(opened.read(f"{key}/{name}", "optimizer"), value.numpy())
    convert(tmp_path / "dcp", tmp_path / "hf", ConvertOptions(to="hf"))
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == set(model.state_dict())


def test_a_model_with_a_module_called_state_stays_a_model(tmp_path):
    tensors = {"state.proj.weight": torch.ones(2, 2), "state.step": torch.ones(1), "head.weight": torch.ones(2)}
    save_dcp(tmp_path / "dcp", tensors)
    opened = open_stored(tmp_path / "dcp")
    assert opened.groups == ("model",) and set(opened.keys("model")) == set(tensors)
