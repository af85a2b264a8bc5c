"""Paddle's unified checkpoint: every variant gives the true values, in the layout of the model's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from holdfast.core.errors import Damaged, Mismatch, Unsupported
from holdfast.sources import open_stored
from holdfast.sources.paddle.unified import FORMAT
from tests.sources.paddle.folders import GOLDEN, random_matrix, states_of, write_group

TRUTH = GOLDEN / "truth_llama_bf16.npz"


def is_turned(key: str) -> bool:
    return key.endswith("_proj.weight")


def static_names() -> dict[str, str]:
    """The truth names moments by the numbers that Paddle gave its layers, in the order they were made."""
    truth = np.load(TRUTH)
    keys = [name.removeprefix("model::") for name in truth if name.startswith("model::")]
    statics = [name for name in truth if name.endswith("_moment1_0")]
    return {key: static.removesuffix("moment1_0") for key, static in zip(keys, statics, strict=True)}


def test_model_masters_and_moments_have_their_true_values() -> None:
    truth = np.load(TRUTH)
    checkpoint = open_stored(GOLDEN / "llama_bf16_hf")
    assert checkpoint.groups == ("model", "master_weights", "optimizer")
    for key, static in static_names().items():
        turn = np.transpose if is_turned(key) else np.asarray
        model = checkpoint.read(key, "model")
        assert model.dtype == ml_dtypes.bfloat16
        assert np.array_equal(model.astype(np.float32), turn(truth[f"model::{key}"])), key
        assert np.array_equal(checkpoint.read(key, "master_weights"), turn(truth[f"master::{key}"])), key
        for name in ("moment1_0", "moment2_0"):
            assert np.array_equal(checkpoint.read(f"{key}/{name}"), turn(truth[static + name])), key
        for name in ("beta1_pow_acc_0", "beta2_pow_acc_0"):
            assert np.array_equal(checkpoint.read(f"{key}/{name}"), truth[static + name]), key


def test_merged_and_unmerged_optimizers_of_a_run_are_equal() -> None:
    merged = open_stored(GOLDEN / "shard2_fp32_hf")
    unmerged = open_stored(GOLDEN / "shard2_fp32_nonmerge")
    assert merged.groups == unmerged.groups == ("model", "optimizer")
    for group in merged.groups:
        assert set(merged.keys(group)) == set(unmerged.keys(group))
        for key in merged.keys(group):
            assert merged.read(key, group).tobytes() == unmerged.read(key, group).tobytes(), key


def test_moments_lie_as_the_model_does_also_without_masters() -> None:
    folder = GOLDEN / "llama_fp32_hf"
    stored = load_file(folder / "optimizer-00001-of-00001.safetensors")
    checkpoint = open_stored(folder)
    for key in checkpoint.keys("model"):
        turn = np.transpose if is_turned(key) else np.asarray
        for name in ("moment1_0", "moment2_0"):
            got = checkpoint.read(f"{key}/{name}", "optimizer")
            assert got.shape == checkpoint.read(key, "model").shape
            assert np.array_equal(got, turn(stored[f"{key}/{name}"])), key


WEIGHTS = {
    "model.embed_tokens.weight": random_matrix(1, 8, 4),
    "model.layers.0.self_attn.q_proj.weight": random_matrix(2, 4, 4),
    "model.layers.0.mlp.up_proj.weight": random_matrix(3, 4, 6),
    "model.layers.0.mlp.experts.w1": random_matrix(4, 2, 4, 6),
    "model.norm.weight": random_matrix(5, 4),
}


def for_torch(weights: dict[str, Any]) -> dict[str, Any]:
    return {key: value.T if is_turned(key) else value for key, value in weights.items()}


@pytest.mark.parametrize("hf", [True, False])
@pytest.mark.parametrize("bits", ["BF16", "U16"])
def test_either_layout_of_the_model_and_raw_bits_of_bfloat16(tmp_path: Path, hf: bool, bits: str) -> None:
    model = for_torch(WEIGHTS) if hf else WEIGHTS
    narrow = {key: np.ascontiguousarray(value).astype(ml_dtypes.bfloat16) for key, value in model.items()}
    raw = {key: value.view(np.uint16) for key, value in narrow.items()}
    write_group(tmp_path / "c", "model", raw if bits == "U16" else narrow, "pt" if hf else "np")
    write_group(tmp_path / "c", "master_weights", WEIGHTS)
    write_group(tmp_path / "c", "optimizer", states_of(WEIGHTS), master_weights=True)
    checkpoint = open_stored(tmp_path / "c")
    assert "unified" in FORMAT and FORMAT in repr(checkpoint)
    for key, value in model.items():
        assert checkpoint.read(key, "model").tobytes() == narrow[key].tobytes()
        assert np.array_equal(checkpoint.read(key, "master_weights"), value)
        assert np.array_equal(checkpoint.read(f"{key}/moment1_0"), value * np.float32(0.5))


@pytest.mark.parametrize("form", ["pt", "np"])
def test_a_model_of_square_matrices_alone_goes_by_its_masters_values(tmp_path: Path, form: str) -> None:
    """The header's note says the opposite of the truth here: values come first."""
    weights = {f"layers.{n}.o_proj.weight": random_matrix(n, 40, 40) for n in range(3)}
    model = weights if form == "pt" else {key: value.T for key, value in weights.items()}
    write_group(tmp_path / "c", "model", model, form)
    write_group(tmp_path / "c", "master_weights", weights)
    write_group(tmp_path / "c", "optimizer", states_of(weights), master_weights=True)
    checkpoint = open_stored(tmp_path / "c")
    for key, value in model.items():
        assert np.array_equal(checkpoint.read(key, "master_weights"), value)
        assert np.array_equal(checkpoint.read(f"{key}/moment2_0"), value * np.float32(0.25))


@pytest.mark.parametrize("form", ["pt", "np"])
def test_square_matrices_without_masters_go_by_what_the_file_says(tmp_path: Path, form: str) -> None:
    weights = {"o_proj.weight": random_matrix(1, 4, 4)}
    write_group(tmp_path / "c", "model", weights, form)
    write_group(tmp_path / "c", "optimizer", states_of(weights))
    got = open_stored(tmp_path / "c").read("o_proj.weight/moment1_0")
    expected = weights["o_proj.weight"] * np.float32(0.5)
    assert np.array_equal(got, expected.T if form == "pt" else expected)


def test_masters_written_under_the_models_names(tmp_path: Path) -> None:
    write_group(tmp_path / "c", "model", WEIGHTS)
    write_group(tmp_path / "c", "optimizer", states_of(WEIGHTS), master_weights=True)
    (tmp_path / "c" / "config.json").write_text('{"dtype": "bfloat16"}')
    checkpoint = open_stored(tmp_path / "c")
    assert checkpoint.groups == ("model", "master_weights", "optimizer")
    for key, value in WEIGHTS.items():
        assert np.array_equal(checkpoint.read(key, "master_weights"), value)
        assert np.array_equal(checkpoint.read(f"{key}/moment1_0"), value * np.float32(0.5))


def test_a_run_that_left_its_model_out_is_read_from_its_masters(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    keys = list(WEIGHTS)
    for part, own in (("shard00", keys[:2]), ("shard01", keys[2:])):
        save_file({key: WEIGHTS[key] for key in own}, folder / f"master_weights.{part}.safetensors")
        save_file(states_of({key: WEIGHTS[key] for key in own}), folder / f"optimizer.{part}.safetensors")
    (folder / "optimizer.safetensors.index.json").write_text('{"optim_shard_num": 1}')
    checkpoint = open_stored(folder)
    assert checkpoint.groups == ("model", "master_weights", "optimizer")
    for key, value in WEIGHTS.items():
        assert np.array_equal(checkpoint.read(key), value)


def test_the_step_that_the_trainer_noted(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shard2_fp32_hf", tmp_path / "c")
    assert open_stored(tmp_path / "c").step is None
    (tmp_path / "c" / "trainer_state.json").write_text('{"global_step": 7}')
    assert open_stored(tmp_path / "c").step == 7


def test_an_adapter_is_the_model_of_its_folder(tmp_path: Path) -> None:
    weights = {"q_proj.lora_A": random_matrix(1, 4, 4), "q_proj.lora_B": random_matrix(2, 4, 8)}
    write_group(tmp_path / "c", "peft_model", weights, type="lora")
    checkpoint = open_stored(tmp_path / "c")
    assert checkpoint.groups == ("model",)
    assert np.array_equal(checkpoint.read("q_proj.lora_A"), weights["q_proj.lora_A"])


def test_parts_of_tensor_parallel_ranks_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_group(folder, "model", {"up_proj.weight": random_matrix(1, 6, 4)}, "pt")
    save_file(states_of({"up_proj.weight": random_matrix(2, 4, 3)}), folder / "optimizer.tp00.safetensors")
    with pytest.raises(Unsupported, match=r"up_proj.*\[4, 3\].*\[6, 4\].*ignore_merge_optimizer"):
        open_stored(folder)


def test_quantized_moments_are_refused_by_name(tmp_path: Path) -> None:
    write_group(tmp_path / "c", "model", WEIGHTS)
    write_group(tmp_path / "c", "optimizer", states_of(WEIGHTS), ckpt_quant_stage="O1")
    with pytest.raises(Unsupported, match="ckpt_quant_stage 'O1'"):
        open_stored(tmp_path / "c")


def test_scales_without_a_word_in_the_index_are_refused_too(tmp_path: Path) -> None:
    states = states_of(WEIGHTS)
    states["model.norm.weight/moment1_0@scales"] = random_matrix(1, 4)
    write_group(tmp_path / "c", "model", WEIGHTS)
    write_group(tmp_path / "c", "optimizer", states)
    with pytest.raises(Unsupported, match="@scales"):
        open_stored(tmp_path / "c")


def test_layers_that_lie_in_different_layouts_are_refused(tmp_path: Path) -> None:
    weights = {f"layers.{n}.up_proj.weight": random_matrix(n, 4, 6) for n in range(2)}
    model = {**weights, "layers.0.up_proj.weight": weights["layers.0.up_proj.weight"].T}
    write_group(tmp_path / "c", "model", model, "pt")
    write_group(tmp_path / "c", "optimizer", states_of(weights))
    with pytest.raises(Mismatch, match=r"layers\.1\.up_proj\.weight and layers\.0"):
        open_stored(tmp_path / "c")


def test_a_missing_part_of_an_unmerged_optimizer_is_damage(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shard2_fp32_nonmerge", tmp_path / "c")
    (tmp_path / "c" / "optimizer.shard01.safetensors_shard_0002").unlink()
    with pytest.raises(Damaged, match=r"expected 2 parts of optimizer.shard01.safetensors, found 1"):
        open_stored(tmp_path / "c")


def test_a_missing_file_of_an_index_is_damage(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shard2_fp32_hf", tmp_path / "c")
    (tmp_path / "c" / "optimizer-00002-of-00002.safetensors").unlink()
    with pytest.raises(Damaged, match=r"names optimizer-00002-of-00002.safetensors, which is missing"):
        open_stored(tmp_path / "c")


def test_an_index_whose_tensor_is_in_no_file_is_damage(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shard2_fp32_hf", tmp_path / "c")
    path = tmp_path / "c" / "optimizer.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lost/moment1_0"] = "optimizer-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(Damaged, match="lost/moment1_0"):
        open_stored(tmp_path / "c")


def test_one_state_in_two_files_is_damage(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "shard2_fp32_nonmerge", tmp_path / "c")
    for part in ("0001", "0002"):
        name = f"safetensors_shard_{part}"
        shutil.copy(tmp_path / "c" / f"optimizer.shard00.{name}", tmp_path / "c" / f"optimizer.shard02.{name}")
    with pytest.raises(Damaged, match=r"is in optimizer.shard00"):
        open_stored(tmp_path / "c")


def test_holdfasts_own_files_without_their_manifest_are_not_taken_for_paddles(tmp_path: Path) -> None:
    write_group(tmp_path / "c", "model", WEIGHTS)
    write_group(tmp_path / "c", "optimizer", {"model.norm.weight/exp_avg": random_matrix(1, 4)})
    assert open_stored(tmp_path / "c").groups == ("model",)
