"""The moving average: exact, independent of the model's start, resumed bit for bit, opened by transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(8, 5)).square().sum().backward()
    optimizer.step()


def averages(ema: holdfast.EMA) -> dict[str, torch.Tensor]:
    return {key: shard.tensor.clone() for key, shard in ema.holdfast_averages().items()}


@pytest.mark.parametrize("device", ["same", "cpu"])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.9999])
def test_it_is_the_weighted_mean_of_what_it_saw(decay: float, device: str) -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    ema = holdfast.EMA(model, decay, every=2, device=device)
    seen: list[np.ndarray] = []
    for step in range(20):
        train(model, optimizer, step)
        ema.update()
        if step % 2:
            seen.append(model[0].weight.detach().double().numpy().copy())
    weights = np.array([decay ** (len(seen) - 1 - age) for age in range(len(seen))])
    expected = np.tensordot(weights / weights.sum(), np.array(seen), 1)
    assert ema.updates == 10
    np.testing.assert_allclose(averages(ema)["0.weight"].numpy(), expected, rtol=2e-6, atol=1e-7)
    assert torch.equal(averages(ema)["1.running_mean"], model[1].running_mean)


def test_the_host_gives_the_same_bits_as_the_device() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    one, other = holdfast.EMA(model, 0.9), holdfast.EMA(model, 0.9, device="cpu")
    for step in range(7):
        train(model, optimizer, step)
        one.update()
        other.update()
    first, second = averages(one), averages(other)
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_swap_gives_the_average_and_takes_it_back() -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    ema = holdfast.EMA(model, 0.9)
    for step in range(3):
        train(model, optimizer, step)
        ema.update()
    before, expected = copy.deepcopy(model.state_dict()), averages(ema)
    with pytest.raises(RuntimeError, match="in the middle"), ema.swap() as swapped:
        assert all(torch.equal(value, expected[key]) for key, value in swapped.state_dict().items())
        raise RuntimeError("in the middle")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("device", ["same", "cpu"])
def test_it_resumes_bit_for_bit(tmp_path: Path, device: str) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    ema = holdfast.EMA(model, 0.95, every=3, device=device)
    state = {"model": model, "optimizer": optimizer, "ema": ema}
    for step in range(8):
        train(model, optimizer, step)
        ema.update()
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        handle = checkpointer.save(8, state)
        for step in range(8, 20):
            train(model, optimizer, step)
            ema.update()
        handle.result(30)
        fresh = model_of(1)
        again: dict[str, Any] = {
            "model": fresh,
            "optimizer": torch.optim.AdamW(fresh.parameters()),
            "ema": holdfast.EMA(fresh, 0.95, every=3, device=device),
        }
        assert checkpointer.restore(again) == 8
    for step in range(8, 20):
        train(fresh, again["optimizer"], step)
        again["ema"].update()
    first, second = averages(ema), averages(again["ema"])
    assert again["ema"].updates == ema.updates == 6
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_transformers_opens_it_in_its_subfolder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ema = holdfast.EMA(model, 0.5)
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update()
    checkpoint = holdfast.save(tmp_path / "x", {"model": model, "ema": ema})
    assert "ema/config.json" in checkpoint.manifest.files and checkpoint.verify().good
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "x", subfolder="ema")
    tokens = torch.arange(10)[None]
    with ema.swap(), torch.no_grad():
        expected = model.eval()(tokens).logits
    with torch.no_grad():
        assert torch.equal(opened.eval()(tokens).logits, expected)


@pytest.mark.parametrize("wrong", [{"decay": 1.0}, {"decay": -0.1}, {"every": 0}, {"every": True}, {"device": "gpu"}])
def test_odd_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(holdfast.InvalidArgument):
        holdfast.EMA(model_of(), **{"decay": 0.9, **wrong})  # type: ignore[arg-type]


def test_nothing_is_saved_or_averaged_while_the_average_is_swapped_in(tmp_path: Path) -> None:
    ema = holdfast.EMA(model_of(), 0.9)
    with ema.swap():
        for call in (ema.update, ema.swap().__enter__, lambda: holdfast.save(tmp_path / "x", {"ema": ema})):
            with pytest.raises(holdfast.Unsupported):
                call()
    assert not (tmp_path / "x").exists()


def test_a_model_that_is_cast_between_updates_is_averaged_unrounded() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(torch.bfloat16)
    ema = holdfast.EMA(model, 0.5, device="cpu")
    ema.update()
    ema.settle()
    model.float()
    with torch.no_grad():
        model[0].weight.copy_(torch.full((3, 3), 1 + 2.0**-20))
        model[1].running_mean.copy_(torch.full((3,), 1 + 2.0**-20))
    for _ in range(40):
        ema.update()
    ema.settle()
    held = {key: shard.tensor for key, shard in ema.holdfast_averages().items()}
    assert torch.equal(held["1.running_mean"], model[1].running_mean) and held["1.running_mean"].dtype == torch.float32
    assert (held["0.weight"] - model[0].weight).abs().max() < 2.0**-23
