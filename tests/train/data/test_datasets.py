"""Datasets give the samples that were asked for, and say what is wrong with a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.train.data.datasets import DataConfig, open_datasets


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_packed_tokens(tmp_path: Path, dtype: str):
    tokens = np.arange(41, dtype=dtype)
    tokens.tofile(tmp_path / "t.bin")
    dataset, evaluation = open_datasets(DataConfig("tokens", str(tmp_path / "t.bin"), 10, dtype), 100)
    assert evaluation is None
    assert len(dataset) == 4
    assert dataset.read(np.array([3, 0])).tolist() == [list(range(30, 41)), list(range(11))]


def test_text_is_bytes(tmp_path: Path):
    (tmp_path / "t.txt").write_bytes(b"abcdefghi")
    dataset, _ = open_datasets(DataConfig("text", str(tmp_path / "t.txt"), 4), 256)
    assert [bytes(row.astype(np.uint8)) for row in dataset.read(np.arange(2))] == [b"abcde", b"efghi"]


def test_synthetic_is_the_same_every_time_and_learnable():
    first, _ = open_datasets(DataConfig(samples=20, sequence=32), 50)
    again, _ = open_datasets(DataConfig(samples=20, sequence=32), 50)
    rows = first.read(np.arange(20))
    assert rows.shape == (20, 33)
    assert np.array_equal(rows[7:8], again.read(np.array([7])))
    steps = np.diff(rows, axis=1) % 50
    assert all((row == np.bincount(row).argmax()).mean() > 0.6 for row in steps)


def test_evaluation_is_never_trained_on():
    train, evaluation = open_datasets(DataConfig(samples=20, sequence=8, evaluation_samples=5), 50)
    assert evaluation is not None
    assert (len(train), len(evaluation)) == (15, 5)
    whole, _ = open_datasets(DataConfig(samples=20, sequence=8), 50)
    assert np.array_equal(evaluation.read(np.arange(5)), whole.read(np.arange(15, 20)))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"kind": "tokens", "path": "none.bin"}, "none.bin"),
        ({"kind": "tokens"}, "data.path"),
        ({"samples": 4, "evaluation_samples": 4}, "use at most 3"),
    ],
)
def test_what_is_wrong_is_said(config: dict[str, Any], match: str):
    with pytest.raises(holdfast.HoldfastError, match=match):
        open_datasets(DataConfig(**config), 256)


def test_a_file_that_is_too_short_or_ragged(tmp_path: Path):
    (tmp_path / "t.bin").write_bytes(b"abc")
    with pytest.raises(holdfast.HoldfastError, match=r"t\.bin"):
        open_datasets(DataConfig("tokens", str(tmp_path / "t.bin"), 1), 256)
    (tmp_path / "e.bin").write_bytes(b"")
    with pytest.raises(holdfast.HoldfastError, match="one sample needs 2"):
        open_datasets(DataConfig("text", str(tmp_path / "e.bin"), 1), 256)
    with pytest.raises(holdfast.InvalidArgument, match="needs 256"):
        open_datasets(DataConfig("text", str(tmp_path / "t.bin"), 1), 255)


@pytest.mark.parametrize("wrong", [{"kind": "csv"}, {"dtype": "int8"}, {"sequence": 0}])
def test_settings_that_make_no_sense(wrong: dict[str, Any]):
    with pytest.raises(holdfast.InvalidArgument):
        DataConfig(**wrong)
