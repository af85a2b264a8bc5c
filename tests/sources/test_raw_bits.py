"""bfloat16 that is stored as uint16: read as what it is where something says so, refused where nothing does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from tests.cli.calls import call
from tests.sources.paddle.folders import random_matrix

WEIGHTS = {"fc.weight": random_matrix(1, 6, 4), "fc.bias": random_matrix(2, 6)}


def written(folder: Path, config: dict[str, Any] | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """A folder whose weights are the raw bits of bfloat16; returns the weights."""
    folder.mkdir()
    true = {key: value.astype(ml_dtypes.bfloat16) for key, value in WEIGHTS.items()}
    save_file({key: value.view(np.uint16) for key, value in true.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return true


@pytest.mark.parametrize("form", ["hf", "holdfast", "dcp", "paddle"])
def test_bits_of_which_nothing_says_what_they_are_are_not_converted(tmp_path: Path, form: str) -> None:
    written(tmp_path / "a")
    with pytest.raises(
        Unsupported, match=r"2 weights are stored as uint16, such as model: fc\.bias.*--uint16 bfloat16"
    ):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to=form))
    assert not (tmp_path / "b").exists()


def test_the_user_says_that_they_are_bfloat16(tmp_path: Path) -> None:
    true = written(tmp_path / "a", {"model_type": "llama"})
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf", uint16="bfloat16"))
    opened = holdfast.open(tmp_path / "b")
    for key, value in true.items():
        assert opened.read(key).dtype == ml_dtypes.bfloat16 and np.array_equal(opened.read(key), value)
    convert(tmp_path / "a", tmp_path / "c", ConvertOptions(uint16="bfloat16", dtype="float32"))
    assert np.array_equal(holdfast.open(tmp_path / "c").read("fc.weight"), true["fc.weight"].astype(np.float32))


def test_the_user_says_that_they_are_whole_numbers(tmp_path: Path) -> None:
    written(tmp_path / "a")
    assert call("convert", str(tmp_path / "a"), str(tmp_path / "b"), "--uint16", "uint16").exit_code == 0
    assert holdfast.open(tmp_path / "b").read("fc.weight").dtype == np.uint16
    convert(tmp_path / "b", tmp_path / "c", ConvertOptions(uint16="bfloat16"))  # too late is not too late
    assert holdfast.open(tmp_path / "c").read("fc.weight").dtype == ml_dtypes.bfloat16
    with pytest.raises(InvalidArgument, match="--uint16 half"):
        convert(tmp_path / "a", tmp_path / "d", ConvertOptions(uint16="half"))


@pytest.mark.parametrize(
    "config", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"text_config": {"dtype": "bfloat16"}}]
)
def test_the_config_says_that_they_are_bfloat16(tmp_path: Path, config: dict[str, Any]) -> None:
    true = written(tmp_path / "a", config)
    opened = holdfast.open(tmp_path / "a")
    assert np.array_equal(opened.read("fc.weight"), true["fc.weight"])
    assert any("read as bfloat16, as config.json says" in note for note in opened.notes)
    model = torch.nn.Module()
    model.fc = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
    holdfast.load(tmp_path / "a", {"model": model})
    assert torch.equal(model.fc.weight.float(), torch.from_numpy(true["fc.weight"].astype(np.float32)))


def test_a_cast_on_load_never_takes_bits_for_numbers(tmp_path: Path) -> None:
    written(tmp_path / "a")
    model = torch.nn.Module()
    model.fc = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
    with pytest.raises(Mismatch, match="a cast would interpret raw bits as numbers"):
        holdfast.load(tmp_path / "a", {"model": model}, cast=True)
