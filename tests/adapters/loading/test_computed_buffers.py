"""Buffers that no checkpoint holds, of models on the meta device: computed by their modules, or named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from tests.adapters.loading.test_meta_tensors import is_on_meta, on_meta


class Table(nn.Module):
    """A buffer that no checkpoint holds, beside a weight."""

    table: torch.Tensor

    def __init__(self, *, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.randn(3))
        self.child = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4.0) * scale, persistent=False)


class Resettable(Table):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        with torch.no_grad():
            self.table.copy_(torch.arange(4.0) * self.scale)


class Replacing(Table):
    def reset_parameters(self) -> None:
        self.table = torch.arange(4.0) * self.scale


class NeedsChildren(Table):
    def reset_parameters(self) -> None:
        self.child.reset_parameters()
        self.table.fill_(1.0)


class FillsPart(Table):
    def reset_parameters(self) -> None:
        self.table[:2] = 1.0


class Draws(Table):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.table.copy_(torch.rand(4))


class Around(nn.Module):
    """A model that initializes its modules, as GPT-2 and transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Table())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Table):
            module.weight.data.normal_()
            module.table.copy_(torch.arange(4.0) * module.scale)


@pytest.mark.parametrize("make", [Resettable, Replacing, Around, Draws])
def test_buffers_are_computed_by_the_module_or_by_a_model_around_it(tmp_path: Path, make: Any) -> None:
    model = make()
    holdfast.save(tmp_path / "x", {"model": model})
    live = on_meta(make)
    buffers = dict(live.named_buffers())
    state = torch.get_rng_state()
    report = holdfast.load(tmp_path / "x", {"model": live})
    assert torch.equal(torch.get_rng_state(), state)
    (name,) = buffers
    assert report.computed == (f"model: {name}",) and report.non_persistent == () and report.on_meta == ()
    (table,) = live.buffers()
    assert table is buffers[name] and table.device.type == "cpu"
    if make is not Draws:
        assert torch.equal(table, torch.arange(4.0) * 2)
    for key, value in live.state_dict().items():
        assert torch.equal(value, model.state_dict()[key]), key


@pytest.mark.parametrize("make", [Table, NeedsChildren, FillsPart])
def test_buffers_that_cannot_be_computed_are_named_and_nothing_is_touched(tmp_path: Path, make: Any) -> None:
    model = make()
    holdfast.save(tmp_path / "x", {"model": model})
    live = on_meta(make)
    with pytest.raises(holdfast.Mismatch, match=r"model: table: on the meta device, no checkpoint holds it"):
        holdfast.load(tmp_path / "x", {"model": live})
    assert is_on_meta(live)
    report = holdfast.load(tmp_path / "x", {"model": live}, ignore=["table"])
    assert report.on_meta == ("model: table",) and live.table.is_meta and not live.weight.is_meta
    live = on_meta(make)
    with pytest.warns(holdfast.HoldfastWarning, match="still on the meta device: model: table"):
        holdfast.load(tmp_path / "x", {"model": live}, strict=False)
    assert live.table.is_meta and torch.equal(live.weight, model.weight)


def test_tensors_in_memory_are_not_initialized_anew(tmp_path: Path) -> None:
    model = Resettable()
    holdfast.save(tmp_path / "x", {"model": model})
    live = Resettable()
    live.table = torch.empty(4, device="meta")
    live.child = on_meta(lambda: nn.Linear(2, 2))
    kept = live.weight.detach().clone()
    holdfast.load(tmp_path / "x", {"model": live}, ignore=["weight"])
    assert torch.equal(live.weight, kept) and torch.equal(live.table, model.table)


def test_buffers_in_memory_stay_as_they_are(tmp_path: Path) -> None:
    model = Resettable()
    holdfast.save(tmp_path / "x", {"model": model})
    live = Resettable()
    live.table.zero_()
    report = holdfast.load(tmp_path / "x", {"model": live})
    assert report.non_persistent == ("model: table",) and report.computed == () and not live.table.any()


TINY: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", TINY | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ("bert", TINY),
    ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 32}),
    ("gemma3_text", TINY | {"head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen2", TINY | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ("phi3", TINY | {"num_key_value_heads": 1, "pad_token_id": 0}),
]


def hub_model(name: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    factory: Any = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    return factory.from_config(AutoConfig.for_model(name, **settings))


def require_as_from_pretrained(live: Any, folder: Path) -> None:
    pretrained = type(live).from_pretrained(folder)
    expected = dict(pretrained.named_parameters()) | dict(pretrained.named_buffers())
    found = dict(live.named_parameters()) | dict(live.named_buffers())
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]) and value.dtype == expected[key].dtype, key
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(live.eval()(tokens).logits, pretrained.eval()(tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"), [MODELS[0], *(pytest.param(*case, marks=pytest.mark.full) for case in MODELS[1:])]
)
def test_a_model_of_the_hub_built_on_meta_equals_from_pretrained(tmp_path: Path, name: str, settings: Any) -> None:
    hub_model(name, settings).save_pretrained(tmp_path / "hub")
    live = on_meta(lambda: hub_model(name, settings))
    report = holdfast.load(tmp_path / "hub", {"model": live})
    assert report.on_meta == () and not report.non_persistent
    require_as_from_pretrained(live, tmp_path / "hub")
