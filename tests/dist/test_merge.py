"""Merges shared by ranks: the same bytes as one process, and one error for all."""

import json
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


def one_and_four(tmp_path, models, **options):
    """Merge in one process and on 4 ranks; return the folders after a comparison of all their bytes."""
    holdfast.merge(models, tmp_path / "one", max_shard_size=30_000, **options)
    files = run_ranks(WORLD, merge_on_rank, models, tmp_path / "four", options)
    assert len(set(files)) == 1
    assert len(tensor_files(tmp_path / "one")) > 1
    assert folder_bytes(tmp_path / "four") == folder_bytes(tmp_path / "one")


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("method", [pytest.param(m, marks=[] if m == "ties" else pytest.mark.full) for m in OPTIONS])
def test_ranks_write_the_bytes_of_one_process(models, tmp_path, method):
    based = {} if method == "linear" else {"base": models[0], "weights": [0.5, 0.3]}
    chosen = models if method == "linear" else models[1:]
    one_and_four(tmp_path, chosen, **{"method": method, **based, **OPTIONS[method]})


@pytest.mark.full
def test_ranks_share_slerp_and_passthrough(models, tmp_path):
    (tmp_path / "slerp").mkdir()
    one_and_four(tmp_path / "slerp", models[1:2], method="slerp", base=models[0], parameters={"t": 0.3})
    scale = {"scale": {"*.1.*": 0.5, "*": 1.0}}
    one_and_four(tmp_path, models[:1], method="passthrough", parameters=scale, out_dtype="float32")


@pytest.mark.full
def test_ranks_share_slices_of_layers(models, tmp_path):
    parts = [{"path": str(models[0]), "layers": [0, 3]}, {"path": str(models[1]), "layers": [1, 4], "scale": 0.5}]
    fields = {"method": "passthrough", "max_shard_size": 30_000, "slices": [{"models": [part]} for part in parts]}
    (tmp_path / "slices.yaml").write_text(json.dumps(fields))
    holdfast.merge(tmp_path / "slices.yaml", tmp_path / "one")
    run_ranks(WORLD, merge_file_on_rank, tmp_path / "slices.yaml", tmp_path / "four")
    assert folder_bytes(tmp_path / "four") == folder_bytes(tmp_path / "one")
    assert "layers.5.w" in holdfast.open(tmp_path / "one").keys("model")


def merge_file_on_rank(file, out):
    import holdfast.merging.merge as merge

    merge.BLOCK_BYTES = 4096
    return holdfast.merge(file, out).files


@pytest.mark.full
def test_ranks_join_tokens(tmp_path):
    def model(name, seed, tokens):
        generator = torch.Generator().manual_seed(seed)
        path = tmp_path / name
        path.mkdir()
        tensors = {f"model.{key}.weight": torch.randn(130, 70, generator=generator) for key in ("embed_tokens", "w")}
        safetensors.torch.save_file(tensors, path / "model.safetensors")
        (path / "config.json").write_text('{"vocab_size": 130}')
        added = [{"id": 100 + number, "content": token, "special": True} for number, token in enumerate(tokens)]
        vocab = {f"t{number}": number for number in range(100)}
        tokenizer = {"model": {"type": "WordLevel", "vocab": vocab}, "added_tokens": added}
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        return path

    a, b = model("a", 1, ["<x>", "<y>"]), model("b", 2, ["<z>", "<x>", *(f"<{number}>" for number in range(28))])
    one_and_four(tmp_path, [a, b], weights=[0.5, 0.3], tokens="union")
    assert holdfast.open(tmp_path / "four").read("model.embed_tokens.weight", "model").shape[0] == 131


def merge_badly(models, out):
    with pytest.raises(Mismatch, match="has no 'extra'"):
        holdfast.merge(models, out, weights=[1, 1])
    return out.exists()


def test_an_error_is_that_of_all_ranks(models, tmp_path):
    (tmp_path / "m").mkdir()
    safetensors.torch.save_file({"extra": torch.ones(2)}, tmp_path / "m" / "model.safetensors")
    assert run_ranks(2, merge_badly, [tmp_path / "m", models[0]], tmp_path / "out") == [False, False]
