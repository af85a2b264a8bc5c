"""Merges shared by ranks: the same bytes as one process, and one error for all."""

from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.core.errors import Mismatch
from tests.convert.states import tensor_files
from tests.dist.harness import run_ranks

WORLD = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    paths = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        values = {f"layers.{n}.w": torch.randn(130, 70, generator=generator).bfloat16() for n in range(4)}
        paths.append(folder / f"m{number}")
        paths[-1].mkdir()
        safetensors.torch.save_file(values, paths[-1] / "model.safetensors")
    return paths


def merge_on_rank(models, out, options):
    import holdfast.merging.merge as merge

    merge.BLOCK_BYTES = 4096
    return holdfast.merge(models, out, max_shard_size=30_000, **options).files


OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"weights": [0.5, 0.3, 0.4]},
    **{method: {"densities": [0.5, 0.3]} for method in ("ties", "dare_ties", "dare_linear", "della", "della_linear")},
    "task_arithmetic": {},
    "model_stock": {"weights": None},
}


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m == "ties" else pytest.mark.full) for m in OPTIONS])
def test_ranks_write_the_bytes_of_one_process(models, tmp_path, method):
    based = {} if method == "linear" else {"base": models[0], "weights": [0.5, 0.3]}
    models = models if method == "linear" else models[1:]
    options = {"method": method, **based, **OPTIONS[method]}
    holdfast.merge(models, tmp_path / "one", max_shard_size=30_000, **options)
    files = run_ranks(WORLD, merge_on_rank, models, tmp_path / "four", options)
    assert len(set(files)) == 1
    assert tensor_files(tmp_path / "four") == tensor_files(tmp_path / "one")
    record = "merge_record.json"
    assert (tmp_path / "four" / record).read_bytes() == (tmp_path / "one" / record).read_bytes()


def merge_badly(models, out):
    with pytest.raises(Mismatch, match="has no 'extra'"):
        holdfast.merge(models, out, weights=[1, 1])
    return out.exists()


def test_an_error_is_that_of_all_ranks(models, tmp_path):
    (tmp_path / "m").mkdir()
    safetensors.torch.save_file({"extra": torch.ones(2)}, tmp_path / "m" / "model.safetensors")
    assert run_ranks(2, merge_badly, [tmp_path / "m", models[0]], tmp_path / "out") == [False, False]
