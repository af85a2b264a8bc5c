"""Optimizers with 8-bit, 4-bit and float8 states, and quantized weights, of torchao and bitsandbytes."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.adapters.subclass_tensors import plain_tensors

pytestmark = pytest.mark.slow
torchao_optim = pytest.importorskip("torchao.optim")
KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit"]


def model_of(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 72)).to(dtype)


def step(state: dict[str, Any], seed: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
    with torch.compiler.set_stance("force_eager"):
        optimizer.step()


def state_of(kind: Any, seed: int, **options: Any) -> dict[str, Any]:
    model = model_of(seed, options.pop("dtype", torch.float32))
    make = getattr(torchao_optim, kind) if isinstance(kind, str) else kind
    return {"model": model, "optimizer": make(model.parameters(), lr=1e-2, **options)}


def same_weights(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a["model"].parameters(), b["model"].parameters(), strict=True))


@pytest.mark.sliced(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_next_steps_are_equal(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    trained = state_of(kind, 0, dtype=dtype)
    for seed in range(2):
        step(trained, seed)
    checkpoint = holdfast.save(tmp_path / "c", trained)
    assert {"0.weight/exp_avg.codes", "0.weight/exp_avg.scale", "0.bias/exp_avg"} < set(checkpoint.keys("optimizer"))
    fresh = state_of(kind, 1, dtype=dtype)
    stepped = state_of(kind, 2, dtype=dtype)
    step(stepped, 7)
    for resumed in (fresh, stepped):
        holdfast.load(tmp_path / "c", resumed)
    for seed in range(2, 4):
        for state in (trained, fresh, stepped):
            step(state, seed)
    assert same_weights(trained, fresh) and same_weights(trained, stepped)


def test_other_optimizers_and_blocks_are_refused_by_key(tmp_path: Path) -> None:
    trained = state_of("AdamW8bit", 0)
    step(trained, 0)
    holdfast.save(tmp_path / "c", trained)
    refused = {
        ("AdamW4bit", ()): r"0\.weight/exp_avg: stored as .* OptimState8bit .* live one is a OptimState4bit",
        ("AdamW8bit", (("block_size", 128),)): r"0\.weight/exp_avg: .*block_size: stored 256, live 128",
        (torch.optim.AdamW, ()): r"0\.weight/exp_avg: stored as .* OptimState8bit .* AdamW keeps it as a plain tensor",
    }
    for (kind, options), message in refused.items():
        live = state_of(kind, 1, **dict(options))
        with pytest.raises(holdfast.Mismatch, match=message):
            holdfast.load(tmp_path / "c", live, cast=True)
        assert not live["optimizer"].state  # nothing was touched
    plain = state_of(torch.optim.AdamW, 0)
    step(plain, 0)
    holdfast.save(tmp_path / "plain", plain)
    with pytest.raises(holdfast.Mismatch, match=r"0\.weight/exp_avg: stored as a plain float32 .* OptimState8bit"):
        holdfast.load(tmp_path / "plain", state_of("AdamW8bit", 1))


@pytest.mark.sliced(4)
@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit", "AdEMAMix8bit", "Lion8bit"])
def test_bitsandbytes_goes_on_equally(tmp_path: Path, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the import, and of pages that a CPU does not have
        make = getattr(pytest.importorskip("bitsandbytes").optim, kind)
        trained, fresh, stepped = (state_of(make, seed) for seed in range(3))
        step(trained, 0)
        step(stepped, 7)
        checkpoint = holdfast.save(tmp_path / "c", trained)
        assert checkpoint.read("0.weight/state1", "optimizer").dtype == "uint8"
        for resumed in (fresh, stepped):
            holdfast.load(tmp_path / "c", resumed)
        for seed in range(1, 3):
            for state in (trained, fresh, stepped):
                step(state, seed)
    assert same_weights(trained, fresh) and same_weights(trained, stepped)


def configs() -> dict[str, Any]:
    quantization = importlib.import_module("torchao.quantization")
    return {
        "int8": quantization.Int8WeightOnlyConfig(),
        "int8 dynamic": quantization.Int8DynamicActivationInt8WeightConfig(),
        "float8": quantization.Float8WeightOnlyConfig(),
        "int4": quantization.IntxWeightOnlyConfig(weight_dtype=getattr(torch, "int4")),
        "intx dynamic": quantization.Int8DynamicActivationIntxWeightConfig(),
    }


def quantized(name: str, seed: int) -> Any:
    model = model_of(seed, torch.bfloat16)
    importlib.import_module("torchao.quantization").quantize_(model, configs()[name])
    return model


@pytest.mark.parametrize("name", ["int8", "int8 dynamic", "float8", "int4", "intx dynamic"])
def test_quantized_weights(tmp_path: Path, name: str) -> None:
    model, live, plain = quantized(name, 0), quantized(name, 1), model_of(1, torch.bfloat16)
    checkpoint = holdfast.save(tmp_path / "c", {"model": model})
    assert checkpoint.read("0.weight.qdata").shape == (128, 64)
    holdfast.load(tmp_path / "c", {"model": live})
    for saved, loaded in zip(model.parameters(), live.parameters(), strict=True):
        for a, b in zip(plain_tensors(saved), plain_tensors(loaded), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    inputs = torch.randn(3, 64, dtype=torch.bfloat16)
    assert torch.equal(model(inputs), live(inputs))
    with pytest.raises(holdfast.Mismatch, match=r"0\.weight: stored as the tensor subclass .* plain bfloat16"):
        holdfast.load(tmp_path / "c", {"model": plain}, cast=True)
    with pytest.raises(holdfast.Mismatch, match=r"0\.weight: .* (differs|but the live one is a)"):
        holdfast.load(tmp_path / "c", {"model": quantized("int8" if name != "int8" else "float8", 1)})
    holdfast.save(tmp_path / "plain", {"model": plain})
    with pytest.raises(holdfast.Mismatch, match=r"0\.weight: stored as a plain bfloat16 .* the tensor subclass"):
        holdfast.load(tmp_path / "plain", {"model": live}, cast=True)


@pytest.mark.full
def test_a_quantized_model_is_not_called_one_that_from_pretrained_opens(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    importlib.import_module("torchao.quantization").quantize_(model, configs()["int8"])
    with pytest.warns(holdfast.HoldfastWarning, match="tensor subclass, stored as the tensors inside: no config.json"):
        holdfast.save(tmp_path / "c", {"model": model})
    assert not (tmp_path / "c" / "config.json").exists()
