"""Exports open by their program, their weights or their folder, with or without each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, Mismatch, NotFound, Unsupported
from holdfast.sources.paddle.pir.exported_program import read_exported
from tests.sources.paddle.pir.exports import GOLDEN, opened, source_program, translated


@pytest.mark.parametrize("name", ["mlp", "mlp/model.json", "mlp/model.pdiparams"])
def test_an_export_opens_by_each_of_its_files(name: str) -> None:
    checkpoint = opened(GOLDEN / name)
    assert checkpoint.format == "paddle inference params"
    assert checkpoint.path == str(GOLDEN / name)
    assert len(checkpoint.keys("model")) == 6
    assert source_program(GOLDEN / name).format == "paddle pir 3"
    assert len(translated(GOLDEN / name).nodes) == 9
    assert any("its program of 13 operators runs without the class" in note for note in checkpoint.notes)


def test_a_program_without_its_weights(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "mlp" / "model.json", tmp_path)
    for path in (tmp_path, tmp_path / "model.json"):
        checkpoint = opened(path)
        assert checkpoint.keys("model") == []
        assert "are missing: 6 tensors, such as 'linear_2.b_0', in model.pdiparams" in checkpoint.notes[0]
        with pytest.raises(Mismatch, match=r"missing in the checkpoint: model: linear_0\.b_0"):
            holdfast.load_program(path)
    module = holdfast.load_program(tmp_path, weights=GOLDEN / "mlp")
    assert set(module.state_dict()) == set(holdfast.open(GOLDEN / "mlp").keys("model"))


def test_a_program_that_needs_no_weights() -> None:
    checkpoint = opened(GOLDEN / "specials")
    assert checkpoint.format == "paddle program"
    assert checkpoint.notes[0].endswith("model.json has no weights")


def test_several_programs_in_one_folder(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        shutil.copy(GOLDEN / "specials" / "model.json", tmp_path / name)
    with pytest.raises(Unsupported, match=r"several programs: a\.json, b\.json; open one of the files"):
        holdfast.open(tmp_path)
    assert holdfast.open(tmp_path / "a.json").program is not None


def test_other_json_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"text": "x" * 100}))
    with pytest.raises(NotFound, match="not a tensor file that Holdfast can read"):
        holdfast.open(tmp_path / "model.json")
    assert read_exported(b"{}", "x") is None


def test_weights_of_another_program_are_refused(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "mlp" / "model.json", tmp_path)
    shutil.copy(GOLDEN / "cnn" / "model.pdiparams", tmp_path)
    for name in ("model.json", "model.pdiparams"):
        with pytest.raises(Damaged, match=r"13 tensors, but model\.json names 6: are they from different models"):
            holdfast.open(tmp_path / name)


def test_it_converts_and_the_program_runs_with_the_converted_weights(tmp_path: Path) -> None:
    convert(GOLDEN / "mixed" / "model.json", tmp_path / "out", ConvertOptions())
    program = translated(GOLDEN / "mixed")
    module = holdfast.load_program(program, weights=tmp_path / "out")
    for key in holdfast.open(GOLDEN / "mixed").keys("model"):
        expected = holdfast.open(GOLDEN / "mixed").read(key)
        assert expected.dtype.name == "bfloat16"
        assert np.array_equal(module.state_dict()[key].float().numpy(), expected.astype(np.float32))
