"""torchao's low-bit optimizers under FSDP2: the same on the same ranks, on others where the blocks allow it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from tests.integrations.launcher import Launcher

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("low_bit")]
cases = pytest.importorskip("tests.dist.low_bit_cases", exc_type=ImportError)


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["tests.dist.low_bit_cases", "torch._dynamo", "holdfast.checkpointer"]) as started:
        yield started


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(np.array_equal(first[key], second[key]) for key in first)


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@pytest.mark.full
def test_from_two_ranks_to_one(launcher: Launcher, tmp_path: Path) -> None:
    (trained, _) = launcher.values(2, cases.run, str(tmp_path), "AdamW8bit", cases.DIVISIBLE, "two", [])
    ((resumed,),) = launcher.values(1, cases.run, str(tmp_path), "AdamW8bit", cases.DIVISIBLE, "", ["two"])
    assert equal(trained[0], resumed)
    assert tensor_files(tmp_path / "two-on-1") == tensor_files(tmp_path / "two" / "step-000000000002")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_next_steps_are_equal_on_any_number_of_ranks(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    root, shapes = str(tmp_path), cases.DIVISIBLE
    ((truth,),) = launcher.values(1, cases.run, root, kind, shapes, "one", [])
    (on_two, *_) = launcher.values(2, cases.run, root, kind, shapes, "two", ["one", "two"])
    (on_four, *_) = launcher.values(4, cases.run, root, kind, shapes, "", ["one", "two"])
    ((on_one,),) = launcher.values(1, cases.run, root, kind, shapes, "", ["two"])
    assert all(equal(truth, found) for found in (*on_two, *on_four, on_one))
    expected = tensor_files(tmp_path / "one" / "step-000000000002")
    for name in ("two/step-000000000002", "one-on-2", "two-on-2", "one-on-4", "two-on-4", "two-on-1"):
        assert tensor_files(tmp_path / name) == expected, name
    opened = holdfast.open(tmp_path / "two" / "step-000000000002")
    assert opened.read("rows/exp_avg.scale", "optimizer").size * {"AdamW4bit": 128}.get(kind, 256) == 64 * 256


@pytest.mark.full
def test_states_that_only_some_ranks_quantize(launcher: Launcher, tmp_path: Path) -> None:
    root, shapes, kind = str(tmp_path), cases.UNEVEN, "AdamW8bit"
    launcher.values(1, cases.run, root, kind, shapes, "one", [])
    (on_two, *_) = launcher.values(2, cases.run, root, kind, shapes, "two", ["two"])
    assert equal(on_two[0], on_two[1])  # though each coordinate has its own
    keys = holdfast.open(tmp_path / "two" / "step-000000000002").keys("optimizer")
    mixed = ["mixed/exp_avg.codes@fsdp=0", "mixed/exp_avg.qmap@fsdp=0", "mixed/exp_avg.scale@fsdp=0"]
    assert [key for key in keys if "@" in key and "exp_avg_sq" not in key] == [*mixed, "mixed/exp_avg@fsdp=1"]
    refused = launcher.values(1, cases.errors, root, kind, shapes, "two")[0]
    assert "mixed/exp_avg: each coordinate has a OptimState8bit of its own" in refused[0]
    assert "saved with fsdp=2" in refused[0] and "vector" not in refused[0] and "saved with fsdp=2" in refused[2]
    (whole,) = launcher.values(1, cases.errors, root, kind, shapes, "one")
    sharded = launcher.values(4, cases.errors, root, kind, shapes, "one")
    assert "vector/exp_avg: stored as the tensor subclass OptimState8bit of shape [8192]" in sharded[0][0]
    assert "this rank holds 2048 elements" in sharded[0][0] and "cast=True" in sharded[0][0] and not whole[0]
    assert [rank[1]["vector"] for rank in sharded] == ["Tensor"] * 4 and whole[1]["vector"] == "OptimState8bit"
    assert [rank[1]["one_row"] for rank in sharded] == ["OptimState8bit", *["Tensor"] * 3]
    for key in shapes:  # converted without a change: what is plain on 4 ranks was dequantized
        assert np.array_equal(np.concatenate([rank[2][key] for rank in sharded]), whole[2][key]), key


@pytest.mark.full
def test_states_that_are_plain_in_the_checkpoint_are_quantized_with_cast(launcher: Launcher, tmp_path: Path) -> None:
    root, shapes, kind = str(tmp_path), {"vector": (8192,)}, "AdamW8bit"
    launcher.values(4, cases.run, root, kind, shapes, "four", [])
    ((text, classes, moments),) = launcher.values(1, cases.errors, root, kind, shapes, "four")
    assert "vector/exp_avg: stored as a plain float32 tensor" in text and classes == {"vector": "OptimState8bit"}
    exact = holdfast.open(tmp_path / "four" / "step-000000000002").read("vector/exp_avg", "optimizer")
    assert np.abs(moments["vector"] - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["AdamW4bit", "AdamW8bit", "AdamWFp8"])
def test_shards_by_columns(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    for trained, resumed in launcher.values(2, cases.columns, str(tmp_path), kind):
        assert equal(trained, resumed)
    keys = holdfast.open(tmp_path / "columns").keys("optimizer")
    assert "fits/exp_avg.codes" in keys and "straddles/exp_avg.codes@tp=1" in keys


@pytest.mark.full
def test_float8_weights_are_saved_as_the_weights_that_they_wrap(launcher: Launcher, tmp_path: Path) -> None:
    launcher.values(2, cases.float8_weights, str(tmp_path))
    model = cases.Parameters({"weight": (48, 64)})
    holdfast.save(tmp_path / "plain", {"model": model})
    assert tensor_files(tmp_path / "float8") == tensor_files(tmp_path / "plain")
