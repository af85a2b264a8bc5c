"""The Paddle sink: what Paddle wrote comes out as it was, what torch trained comes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from holdfast.convert.run import ConvertOptions, convert
from holdfast.convert.sinks.paddle import is_linear, is_paddle_layout
from holdfast.core.errors import NotFound
from holdfast.sources import open_stored
from holdfast.sources.paddle.optimizer_names import as_torch
from tests.sources.paddle.folders import GOLDEN, random_matrix, states_of, write_group

PADDLE = ConvertOptions(to="paddle")
STEMS = ("model", "master_weights", "optimizer")


def stored(folder: Path, stem: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for path in sorted(folder.glob(f"{stem}[-.]*safetensors*")):
        if path.suffix != ".json":
            out |= load_file(path)
    return out


@pytest.mark.parametrize("name", ["llama_bf16_hf", "llama_fp32_hf", "shard2_fp32_hf", "shard2_fp32_nonmerge"])
def test_what_paddle_wrote_comes_out_as_it_was(name: str, tmp_path: Path) -> None:
    """Also over Holdfast's own format, with torch's names in it."""
    convert(GOLDEN / name, tmp_path / "straight", PADDLE)
    convert(GOLDEN / name, tmp_path / "holdfast", ConvertOptions())
    convert(tmp_path / "holdfast", tmp_path / "over", PADDLE)
    for folder in ("straight", "over"):
        for stem in STEMS:
            before, after = stored(GOLDEN / name, stem), stored(tmp_path / folder, stem)
            assert before.keys() == after.keys()
            for key, value in before.items():
                assert value.dtype == after[key].dtype and value.shape == after[key].shape, key
                assert value.tobytes() == after[key].tobytes(), key


def test_indexes_say_what_paddle_looks_for(tmp_path: Path) -> None:
    convert(GOLDEN / "llama_bf16_hf", tmp_path / "c", PADDLE)
    for stem in STEMS:
        name = f"{stem}.safetensors.index.json"
        ours, theirs = (
            json.loads((folder / name).read_text()) for folder in (tmp_path / "c", GOLDEN / "llama_bf16_hf")
        )
        assert ours == theirs, stem


def test_over_holdfast_the_optimizer_has_torchs_names(tmp_path: Path) -> None:
    convert(GOLDEN / "shard2_fp32_hf", tmp_path / "c", ConvertOptions())
    checkpoint, expected = open_stored(tmp_path / "c"), as_torch(open_stored(GOLDEN / "shard2_fp32_hf"))
    assert set(checkpoint.keys("optimizer")) == set(expected.keys("optimizer"))
    for key in expected.keys("optimizer"):
        assert checkpoint.read(key, "optimizer").tobytes() == expected.read(key, "optimizer").tobytes()
    assert checkpoint.state["optimizer"] == expected.state["optimizer"]


def test_several_files_of_a_group(tmp_path: Path) -> None:
    convert(GOLDEN / "llama_bf16_hf", tmp_path / "c", ConvertOptions(to="paddle", max_shard_size="20KB"))
    assert len(list((tmp_path / "c").glob("optimizer-*.safetensors"))) > 5
    for stem in STEMS:
        before, after = stored(GOLDEN / "llama_bf16_hf", stem), stored(tmp_path / "c", stem)
        assert {key: value.tobytes() for key, value in before.items()} == {k: v.tobytes() for k, v in after.items()}


def test_a_model_in_paddles_layout_is_turned_and_its_states_are_not(tmp_path: Path) -> None:
    weights = {
        "model.embed_tokens.weight": random_matrix(1, 9, 4),
        "model.layers.0.self_attn.q_proj.weight": random_matrix(2, 4, 4),
        "model.layers.0.mlp.up_proj.weight": random_matrix(3, 4, 6),
        "model.layers.0.mlp.down_proj.weight": random_matrix(4, 6, 4),
    }
    narrow = {key: value.astype(ml_dtypes.bfloat16) for key, value in weights.items()}
    write_group(tmp_path / "c", "model", {key: value.view(np.uint16) for key, value in narrow.items()})
    write_group(tmp_path / "c", "master_weights", weights)
    write_group(tmp_path / "c", "optimizer", states_of(weights), master_weights=True)
    convert(tmp_path / "c", tmp_path / "out", PADDLE)
    model = stored(tmp_path / "out", "model")
    for key, value in narrow.items():
        expected = value.T if key.endswith("_proj.weight") else value
        assert model[key].dtype == ml_dtypes.bfloat16 and np.array_equal(model[key], expected)
    for stem in ("master_weights", "optimizer"):
        before, after = stored(tmp_path / "c", stem), stored(tmp_path / "out", stem)
        assert all(np.array_equal(after[key], value) for key, value in before.items())


def test_which_weights_are_linear() -> None:
    for key in ("q_proj.weight", "model.layers.0.mlp.gate.weight", "a.mtp_linear_proj.1.weight", "x.kv_b_proj.weight"):
        assert is_linear(key), key
    for key in ("lm_head.weight", "embed_tokens.weight", "q_proj.lora_A.weight", "q_proj.bias", "q_norm.weight"):
        assert not is_linear(key), key


def test_the_layout_of_a_model_is_told_by_its_width() -> None:
    shapes = {"embed_tokens.weight": (64, 32), "l.up_proj.weight": (48, 32), "l.down_proj.weight": (32, 48)}
    assert not is_paddle_layout(shapes)
    assert is_paddle_layout({key: s[::-1] if "proj" in key else s for key, s in shapes.items()})
    assert not is_paddle_layout({"up_proj.weight": (4, 6)})


def test_nothing_but_a_model_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no module"):
        convert(GOLDEN / "llama_fp32_hf", tmp_path / "c", ConvertOptions(to="paddle", only=("optimizer",)))
