"""Modules: clean keys, ties, buffers, extra state, Hugging Face configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

import holdfast
from holdfast.adapters.huggingface import plain_class
from holdfast.adapters.module import clean_key


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_both_restored(tmp_path: Path) -> None:
    model = Tied()
    checkpoint = holdfast.save(tmp_path / "x", {"model": model})
    assert list(checkpoint.places["model"]) == ["embed.weight"]
    assert checkpoint.manifest.groups["model"].aliases == {"head.weight": "embed.weight"}
    assert (checkpoint.read("head.weight") == model.embed.weight.detach().numpy()).all()
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(5, 3))
    holdfast.load(tmp_path / "x", {"model": untied})
    assert torch.equal(untied.head.weight, model.embed.weight) and torch.equal(untied.embed.weight, model.embed.weight)


def test_declared_ties_whose_copies_differ_are_an_error(tmp_path: Path) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    ties = {"head.weight": "embed.weight"}
    assert list(holdfast.save(tmp_path / "x", {"model": model}, ties=ties).places["model"]) == ["embed.weight"]
    with torch.no_grad():
        model.head.weight[0, 0] += 1
    with pytest.raises(holdfast.LayoutError, match=r"embed\.weight has different values"):
        holdfast.save(tmp_path / "y", {"model": model}, ties=ties)


@pytest.mark.slow
def test_gpt2_is_stored_under_the_keys_transformers_keeps(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    checkpoint = holdfast.save(tmp_path / "ours", {"model": model})
    model.save_pretrained(tmp_path / "theirs")
    theirs = holdfast.open(tmp_path / "theirs")
    assert sorted(checkpoint.places["model"]) == sorted(theirs.places["model"])
    for key in theirs.keys("model"):
        assert (theirs.read(key) == checkpoint.read(key)).all()
    transformers_model: Any = GPT2LMHeadModel
    loaded, info = transformers_model.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_a_hugging_face_folder_loads_as_it_is(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model, fresh = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    for limit in ("5GB", "3KB"):
        model.save_pretrained(tmp_path / limit, max_shard_size=limit)
        report = holdfast.load(tmp_path / limit, {"model": fresh})
        assert not report.verified
        assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())


def test_keys_are_clean_of_wrappers(tmp_path: Path) -> None:
    model: Any = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    compiled = torch.compile(model)
    expected = ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert holdfast.save(tmp_path / "x", {"model": compiled}).keys("model") == expected
    plain: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    holdfast.load(tmp_path / "x", {"model": plain})
    assert torch.equal(plain[0].weight, model[0].weight)
    assert clean_key("_orig_mod.a._checkpoint_wrapped_module.b") == "a.b"


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def test_extra_state_round_trips(tmp_path: Path) -> None:
    value = {"scale": torch.arange(3.0), "step": 4, "nested": [(1, 2)]}
    holdfast.save(tmp_path / "x", {"model": nn.Sequential(nn.Linear(2, 2), Extra(value))})
    fresh = nn.Sequential(nn.Linear(2, 2), Extra(None))
    holdfast.load(tmp_path / "x", {"model": fresh})
    assert torch.equal(fresh[1].value.pop("scale"), torch.arange(3.0))
    assert fresh[1].value == {"step": 4, "nested": [(1, 2)]}


def test_buffers_empty_modules_and_non_persistent_buffers(tmp_path: Path) -> None:
    model: Any = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    model.register_buffer("skipped", torch.ones(2), persistent=False)
    model(torch.randn(5, 3))
    holdfast.save(tmp_path / "x", {"model": model, "nothing": nn.ReLU()})
    fresh: Any = nn.Sequential(nn.BatchNorm1d(3), nn.ReLU())
    holdfast.load(tmp_path / "x", {"model": fresh, "nothing": nn.ReLU()})
    assert torch.equal(fresh[0].running_var, model[0].running_var)
    assert int(fresh[0].num_batches_tracked) == 1
    assert "skipped" not in holdfast.open(tmp_path / "x").keys()


class Mixin:
    pass


class Named(Mixin, LlamaForCausalLM):
    pass


def test_the_architecture_is_the_plain_class_name() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    assert plain_class(model).__name__ == "GPT2LMHeadModel"
    model.__class__ = type("FSDPGPT2LMHeadModel", (Mixin, GPT2LMHeadModel), {})
    assert plain_class(model).__name__ == "GPT2LMHeadModel"
    model.__class__ = type("Sharded", (GPT2LMHeadModel,), {})
    assert plain_class(model).__name__ == "GPT2LMHeadModel"


def test_a_class_that_leads_with_a_mixin_is_plain() -> None:
    assert plain_class(Named(LlamaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=0, pad_token_id=0))) is Named
    model = LlamaForSequenceClassification(
        LlamaConfig(vocab_size=9, hidden_size=32, num_hidden_layers=0, pad_token_id=0)
    )
    assert plain_class(model) is LlamaForSequenceClassification
    model.__class__ = type("FSDP" + type(model).__name__, (Mixin, type(model)), {})
    assert plain_class(model) is LlamaForSequenceClassification


def test_model_dtype_rounds_the_model_and_keeps_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    checkpoint = holdfast.save(tmp_path / "x", {"model": model}, model_dtype="bfloat16")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["dtype"] == "bfloat16"
    assert checkpoint.read("transformer.wte.weight", "model").dtype.name == "bfloat16"
    assert checkpoint.read("transformer.wte.weight", "master_weights").dtype.name == "float32"
    fresh = GPT2LMHeadModel(config)
    report = holdfast.load(tmp_path / "x", {"model": fresh})
    assert not report.cast
    assert all(torch.equal(value, fresh.state_dict()[key]) for key, value in model.state_dict().items())
    made: Any = GPT2LMHeadModel(config)
    half = made.to(torch.bfloat16)
    holdfast.load(tmp_path / "x", {"model": half})
    assert torch.equal(half.transformer.wte.weight, model.transformer.wte.weight.to(torch.bfloat16))
    opened = GPT2LMHeadModel.from_pretrained(tmp_path / "x")
    assert opened.dtype == torch.bfloat16


def test_tied_copies_have_their_moments_compared_and_both_restored(tmp_path: Path) -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    ties = {"head.weight": "embed.weight"}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.full((5, 3), 0.5)}
    holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer}, ties=ties)
    optimizer.state[model.head.weight]["momentum_buffer"].fill_(0.1)
    with pytest.raises(holdfast.LayoutError, match="momentum_buffer has different values"):
        holdfast.save(tmp_path / "y", {"model": model, "optimizer": optimizer}, ties=ties)
    optimizer.state.clear()
    holdfast.load(tmp_path / "x", {"model": model, "optimizer": optimizer}, ties=ties)
    assert [float(state["momentum_buffer"][0, 0]) for state in optimizer.state.values()] == [0.5, 0.5]


def test_patterns_know_tied_keys(tmp_path: Path) -> None:
    model, fresh = Tied(), Tied()
    holdfast.save(tmp_path / "x", {"model": model})
    assert holdfast.load(tmp_path / "x", {"model": fresh}, only=["head.*"]).loaded == ("model: embed.weight",)
    assert holdfast.load(tmp_path / "x", {"model": fresh}, ignore=["head.*"]).loaded == ()


class Copying(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key: value.detach().clone() for key, value in super().state_dict(*args, **kwargs).items()}


def test_a_state_dict_of_copies_is_refused_on_load(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "x", {"model": Copying(2, 2)})
    with pytest.raises(holdfast.Unsupported, match="is a copy"):
        holdfast.load(tmp_path / "x", {"model": Copying(2, 2)})


def test_an_invalid_generation_config_does_not_stop_a_save(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    model.generation_config.do_sample = False
    model.generation_config.temperature = 0.3
    holdfast.save(tmp_path / "x", {"model": model})
    assert json.loads((tmp_path / "x" / "generation_config.json").read_text())["temperature"] == 0.3
