"""Results beside those of mergekit 0.1.5, bit for bit, on three architectures, tied and untied, sharded or not."""

import json
from typing import Any

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
    ours = tmp_path / "ours"
    options = {"normalize": False}
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


def base_and_two(folder, family="llama", tied=True, **options):
    return folder(family, tied=tied), folder(family, seed=1, tied=tied), folder(family, seed=2, tied=tied, **options)


def peer_config(method, base, models, densities=None, **parameters):
    extra = [{} if densities is None else {"density": density} for density in densities or models]
    described_models = [described(m, weight=w, **e) for m, w, e in zip(models, (0.7, 0.6), extra, strict=True)]
    return {"merge_method": method, "models": described_models, "base_model": str(base), "parameters": parameters}


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("parameters", [{}, {"normalize": True, "lambda": 0.8}])
def test_task_arithmetic(folder, tmp_path, family, tied, parameters):
    base, a, b = base_and_two(folder, family, tied, max_shard_size="20KB")
    options: dict[str, Any] = {
        "method": "task_arithmetic",
        "base": base,
        "weights": [0.7, 0.6],
        "parameters": parameters,
    }
    holdfast.merge([a, b], tmp_path / "ours", **options)
    expected = peer_merge(peer_config("task_arithmetic", base, [a, b], **parameters), tmp_path / "theirs")
    assert same(tensors(tmp_path / "ours"), expected)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_dare_with_its_sequence(folder, tmp_path, method, family, tied):
    base, a, b = base_and_two(folder, family, tied)
    options: dict[str, Any] = {"weights": [0.7, 0.6], "densities": [0.5, 0.3], "rng": "mergekit", "seed": 42}
    holdfast.merge([a, b], tmp_path / "ours", method=method, base=base, **options)
    expected = peer_merge(peer_config(method, base, [a, b], [0.5, 0.3]), tmp_path / "theirs", seed=42)
    assert same(tensors(tmp_path / "ours"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_dare_in_other_dtypes_without_rescaling(folder, tmp_path, dtype):
    paths = [folder(dtype=dtype), folder(seed=1, dtype=dtype), folder(seed=2, dtype=dtype)]
    options: dict[str, Any] = {
        "weights": [0.7, 0.6],
        "densities": [0.5, 0.3],
        "rng": "mergekit",
        "seed": 1,
        "base": paths[0],
    }
    holdfast.merge(paths[1:], tmp_path / "ours", method="dare_ties", parameters={"rescale": False}, **options)
    config = peer_config("dare_ties", paths[0], paths[1:], [0.5, 0.3], rescale=False)
    assert same(tensors(tmp_path / "ours"), peer_merge(config, tmp_path / "theirs", seed=1))


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("parameters", [{}, {"rescale": True, "normalize": False, "int8_mask": True}])
def test_ties_with_a_stable_sort(folder, tmp_path, family, tied, parameters):
    base, a, b = base_and_two(folder, family, tied)
    own = {name: value for name, value in parameters.items() if name != "int8_mask"}
    options: dict[str, Any] = {"weights": [0.7, 0.6], "densities": [0.5, 0.3], "parameters": own}
    holdfast.merge([a, b], tmp_path / "ours", method="ties", base=base, **options)
    config = peer_config("ties", base, [a, b], [0.5, 0.3], **parameters)
    expected = peer_merge(config, tmp_path / "theirs", stable=True)
    assert same(tensors(tmp_path / "ours"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_ties_in_other_dtypes(folder, tmp_path, dtype):
    paths = [folder(dtype=dtype), folder(seed=1, dtype=dtype), folder(seed=2, dtype=dtype)]
    options: dict[str, Any] = {"weights": [0.7, 0.6], "densities": [0.5, 0.3], "base": paths[0]}
    holdfast.merge(paths[1:], tmp_path / "ours", method="ties", **options)
    config = peer_config("ties", paths[0], paths[1:], [0.5, 0.3])
    assert same(tensors(tmp_path / "ours"), peer_merge(config, tmp_path / "theirs", stable=True))


def test_ties_of_the_released_one_differs_only_at_the_threshold(folder, tmp_path):
    base, a, b = base_and_two(folder)
    options: dict[str, Any] = {"weights": [0.7, 0.6], "densities": [0.5, 0.3]}
    holdfast.merge([a, b], tmp_path / "ours", method="ties", base=base, **options)
    ours, theirs = tensors(tmp_path / "ours"), peer_merge(peer_config("ties", base, [a, b], [0.5, 0.3]), tmp_path / "t")
    for key, found in ours.items():
        at_threshold = torch.zeros_like(found, dtype=torch.bool)
        for path, density in ((a, 0.5), (b, 0.3)):
            magnitudes = (tensors(path)[key] - tensors(base)[key]).abs()
            smallest = magnitudes.flatten().float().topk(max(1, int(density * magnitudes.numel()))).values[-1]
            at_threshold |= magnitudes == smallest
        assert torch.equal(found[~at_threshold], theirs[key][~at_threshold])


@pytest.mark.parametrize("method", ["della", "della_linear"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_della_with_its_sequence_and_a_stable_sort(folder, tmp_path, method, family):
    base, a, b = base_and_two(folder, family)
    options: dict[str, Any] = {"weights": [0.7, 0.6], "densities": [0.5, 0.3], "rng": "mergekit", "seed": 42}
    models = [{"path": a, "epsilon": 0.1}, b]
    holdfast.merge(models, tmp_path / "ours", method=method, base=base, **options)
    config = peer_config(method, base, [a, b], [0.5, 0.3])
    config["models"][0]["parameters"]["epsilon"] = 0.1
    expected = peer_merge(config, tmp_path / "theirs", seed=42, stable=True)
    assert same(tensors(tmp_path / "ours"), expected)


def largest_distance(ours, theirs):
    """The largest number of bfloat16 values between two tensors."""
    return max(
        (ours[key].view(torch.int16).int() - theirs[key].view(torch.int16).int()).abs().max().item() for key in theirs
    )


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_slerp_within_one_unit_in_the_last_place(folder, tmp_path, family, tied):
    base, a, _ = base_and_two(folder, family, tied)
    t = {"*mlp*": [0.0, 0.9], "*": 0.3}
    holdfast.merge([a], tmp_path / "ours", method="slerp", base=base, parameters={"t": t})
    peer_t = [{"filter": "mlp", "value": [0.0, 0.9]}, {"value": 0.3}]
    config = {"merge_method": "slerp", "models": [{"model": str(a)}], "base_model": str(base)}
    expected = peer_merge({**config, "parameters": {"t": peer_t}}, tmp_path / "theirs")
    ours = tensors(tmp_path / "ours")
    assert ours.keys() == expected.keys() and largest_distance(ours, expected) <= 1


@pytest.mark.parametrize("filter_wise", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_model_stock(folder, tmp_path, filter_wise, dtype):
    paths = [folder(dtype=dtype), *(folder(seed=seed, dtype=dtype) for seed in (1, 2, 3))]
    ours, parameters = tmp_path / "ours", {"filter_wise": filter_wise}
    holdfast.merge(paths[1:], ours, method="model_stock", base=paths[0], parameters=parameters)
    config = {"merge_method": "model_stock", "models": [{"model": str(path)} for path in paths[1:]]}
    theirs = peer_merge({**config, "base_model": str(paths[0]), "parameters": parameters}, tmp_path / "theirs")
    if dtype == torch.bfloat16:
        assert same(tensors(ours), theirs)
    else:
        assert all(torch.allclose(found, theirs[key], atol=1e-6) for key, found in tensors(ours).items())


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
@pytest.mark.parametrize("method", ["ties", "dare_ties", "della", "model_stock"])
def test_models_in_several_files(folder, tmp_path, method, family, tied):
    sharded = {"tied": tied, "max_shard_size": "20KB"}
    base, a, b = (folder(family, **sharded, **seed) for seed in ({}, {"seed": 1}, {"seed": 2}))
    assert len(list(base.glob("*.safetensors"))) > 1
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    if method == "model_stock":
        holdfast.merge([a, b], ours, method=method, base=base, max_shard_size=30_000)
        listed = [{"model": str(path)} for path in (a, b)]
        expected = peer_merge({"merge_method": method, "models": listed, "base_model": str(base)}, theirs)
    else:
        options: dict[str, Any] = {"weights": [0.7, 0.6], "densities": [0.5, 0.3], "rng": "mergekit", "seed": 42}
        holdfast.merge([a, b], ours, method=method, base=base, max_shard_size=30_000, **options)
        expected = peer_merge(peer_config(method, base, [a, b], [0.5, 0.3]), theirs, seed=42, stable=True)
    assert same(tensors(ours), expected)
    indexed(ours)


def both_from_yaml(tmp_path, config):
    """Merge what a file of mergekit describes with both."""
    (tmp_path / "merge.yml").write_text(json.dumps(config))
    holdfast.merge(tmp_path / "merge.yml", tmp_path / "ours")
    return tensors(tmp_path / "ours"), peer_merge(config, tmp_path / "theirs")


def layers_of(path, begin, end, **parameters):
    return {"model": str(path), "layer_range": [begin, end], "parameters": parameters}


@pytest.mark.parametrize(("family", "tied"), FAMILIES)
def test_passthrough_with_layers_of_two_models(folder, tmp_path, family, tied):
    a, b = folder(family, seed=1, tied=tied), folder(family, seed=2, tied=tied, max_shard_size="20KB")
    last = (1, 2) if family == "qwen2" else (0, 3)  # mergekit cannot write Qwen's config with another number of layers
    parts = [layers_of(a, 0, 1), layers_of(b, 1, 2, scale=[{"filter": "mlp", "value": 0.5}]), layers_of(a, *last)]
    config = {"merge_method": "passthrough", "slices": [{"sources": [part]} for part in parts]}
    ours, theirs = both_from_yaml(tmp_path, config)
    assert same(ours, theirs)
    indexed(tmp_path / "ours")


def test_a_file_of_mergekit_with_slices_gradients_and_filters(folder, tmp_path):
    base, a, _ = base_and_two(folder)
    t = [{"filter": "self_attn", "value": [0, 0.5, 1]}, {"filter": "mlp", "value": [1, 0]}, {"value": 0.5}]
    slices = [
        {"sources": [layers_of(a, 0, 2), layers_of(base, 1, 3)]},
        {"sources": [layers_of(a, 2, 3), layers_of(base, 0, 1)]},
    ]
    config = {"merge_method": "slerp", "slices": slices, "base_model": str(base), "parameters": {"t": t}}
    ours, theirs = both_from_yaml(tmp_path, {**config, "dtype": "bfloat16"})
    assert ours.keys() == theirs.keys() and largest_distance(ours, theirs) <= 1


def test_a_file_of_mergekit_with_ties_by_filter(folder, tmp_path):
    base, a, b = base_and_two(folder, "qwen2")
    weight = [{"filter": "mlp", "value": [0.2, 0.9]}, {"value": 0.5}]
    models = [described(a, weight=weight, density=1.0), described(b, weight=0.3, density=1.0), {"model": str(base)}]
    config = {"merge_method": "ties", "models": models, "base_model": str(base), "dtype": "float32"}
    ours, theirs = both_from_yaml(tmp_path, {**config, "out_dtype": "bfloat16", "parameters": {"int8_mask": True}})
    assert same(ours, theirs)
