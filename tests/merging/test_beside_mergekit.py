"""Results beside those of mergekit 0.1.5, bit for bit, on three architectures, tied and untied, sharded or not."""

import pytest
import torch

import holdfast
from tests.merging.models import indexed, same, tensors
from tests.merging.peer import peer_merge

pytestmark = pytest.mark.full  # mergekit takes seconds to import

FAMILIES = [(family, tied) for family in ("llama", "qwen2", "gpt2") for tied in (True, False)]


def described(path, **parameters):
    return {"model": str(path), "parameters": parameters}


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_linear(folder, tmp_path, family, tied):
    a, b = folder(family, seed=1, tied=tied), folder(family, seed=2, tied=tied, max_shard_size="20KB")
    holdfast.merge([a, b], tmp_path / "ours", weights=[0.7, 0.6], max_shard_size=30_000)
    models = [described(a, weight=0.7), described(b, weight=0.6)]
    expected = peer_merge({"merge_method": "linear", "models": models}, tmp_path / "theirs")
    assert same(tensors(tmp_path / "ours"), expected)
    indexed(tmp_path / "ours")


def test_linear_of_three_without_normalization_in_another_dtype(folder, tmp_path):
    paths = [folder(seed=1), folder(seed=2, dtype=torch.float32), folder(seed=3, dtype=torch.float16)]
    weights = [0.2, [0.1, 0.9], 0.4]
    ours, options = tmp_path / "ours", {"normalize": False}
    holdfast.merge(paths, ours, weights=weights, parameters=options, dtype="float32", out_dtype="bfloat16")
    models = [described(path, weight=weight) for path, weight in zip(paths, weights, strict=True)]
    config = {"merge_method": "linear", "models": models, "parameters": options}
    expected = peer_merge({**config, "dtype": "float32", "out_dtype": "bfloat16"}, tmp_path / "theirs")
    assert same(tensors(ours), expected)


def test_linear_promotes_different_dtypes(folder, tmp_path):
    a, b = folder(seed=1), folder(seed=2, dtype=torch.float16)
    holdfast.merge([a, b], tmp_path / "ours", weights=[1, 1])
    expected = peer_merge(
        {"merge_method": "linear", "models": [described(a, weight=1), described(b, weight=1)]}, tmp_path / "theirs"
    )
    assert same(tensors(tmp_path / "ours"), expected)
    assert {tensor.dtype for tensor in expected.values()} == {torch.float32}


def test_passthrough_with_a_scale(folder, tmp_path):
    a = folder("qwen2", seed=1)
    holdfast.merge([a], tmp_path / "ours", method="passthrough", parameters={"scale": {"*.o_proj.*": 0.3}})
    model = {"model": str(a), "parameters": {"scale": [{"filter": "o_proj", "value": 0.3}, {"value": 1.0}]}}
    expected = peer_merge({"merge_method": "passthrough", "models": [model]}, tmp_path / "theirs")
    assert same(tensors(tmp_path / "ours"), expected)
    assert not same(expected, tensors(a))
