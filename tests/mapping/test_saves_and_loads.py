"""Mappings by name, with real models: what is loaded and saved through them is what transformers has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import holdfast
from holdfast.core.warnings import HoldfastWarning

pytestmark = pytest.mark.slow  # models of transformers


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def moe() -> Any:
    torch.manual_seed(0)
    config_class: Any = transformers.Qwen3MoeConfig
    config = config_class(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8)
    return transformers.Qwen3MoeForCausalLM(config)


class Fused(nn.Module):
    """A model whose tensors are those of another naming."""

    def __init__(self, tensors: dict[str, torch.Tensor], config: Any) -> None:
        super().__init__()
        self.config = config
        self.names = list(tensors)
        for number, tensor in enumerate(tensors.values()):
            self.register_parameter(f"p{number}", nn.Parameter(tensor))

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        found = super().state_dict(*args, **kwargs)
        return {self.names[int(key[1:])]: value for key, value in found.items()}


def fused_of(model: Any) -> dict[str, torch.Tensor]:
    """q, k, v and gate, up of a Llama as one weight each, by torch."""
    state = {key: value.detach() for key, value in model.state_dict().items()}
    out = {}
    for key, value in state.items():
        if key.endswith("q_proj.weight"):
            parts = [state[key.replace("q_proj", name)] for name in ("q_proj", "k_proj", "v_proj")]
            out[key.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif key.endswith("gate_proj.weight"):
            parts = [state[key.replace("gate_proj", name)] for name in ("gate_proj", "up_proj")]
            out[key.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
        elif not key.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight")):
            out[key] = value
    return out


@pytest.mark.parametrize("name", ["llama-fused", "fused"])
def test_a_hub_folder_loads_into_a_fused_model_by_name(tmp_path: Path, name: str) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hub")
    truth = fused_of(model)
    live = Fused({key: torch.zeros_like(value) for key, value in truth.items()}, model.config)
    report = holdfast.load(tmp_path / "hub", {"model": live}, mapping=name)
    assert not report.missing and not report.unexpected
    found = live.state_dict()
    assert all(torch.equal(found[key], value) for key, value in truth.items())


def test_a_fused_model_is_saved_as_transformers_opens_it(tmp_path: Path) -> None:
    model = llama()
    live = Fused(fused_of(model), model.config)
    optimizer = torch.optim.AdamW(live.parameters())
    sum(parameter.sum() for parameter in live.parameters()).backward()
    before = fused_of(model)
    holdfast.save(tmp_path / "saved", {"model": live, "optimizer": optimizer}, mapping="llama-from-fused")
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    tokens = torch.arange(12).reshape(1, 12)
    assert torch.equal(opened(tokens).logits, model(tokens).logits)
    with holdfast.Checkpointer(tmp_path / "run", mapping="llama-from-fused") as checkpointer:
        optimizer.step()
        checkpointer.save(1, {"model": live, "optimizer": optimizer}).result(60)
        stepped = {key: value.clone() for key, value in live.state_dict().items()}
        named = list(zip(live.names, live.parameters(), strict=True))
        moments = {key: optimizer.state[parameter]["exp_avg"].clone() for key, parameter in named}
        fresh = Fused({key: torch.zeros_like(value) for key, value in before.items()}, model.config)
        again = torch.optim.AdamW(fresh.parameters())
        assert checkpointer.restore({"model": fresh, "optimizer": again}) == 1
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in stepped.items())
    for key, parameter in zip(fresh.names, fresh.parameters(), strict=True):
        assert torch.equal(again.state[parameter]["exp_avg"], moments[key])
    keys = holdfast.open(tmp_path / "run" / "step-000000000001").keys("optimizer")
    assert "model.layers.0.self_attn.k_proj.weight/exp_avg" in keys


def test_stacked_experts_are_one_key_each_on_disk(tmp_path: Path) -> None:
    model = moe()
    tokens = torch.arange(12).reshape(1, 12)
    logits = model(tokens).logits
    holdfast.save(tmp_path / "saved", {"model": model}, mapping="from-stacked")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in holdfast.open(tmp_path / "saved").keys()
    opened = transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.allclose(opened(tokens).logits, logits, atol=1e-6)
    model.save_pretrained(tmp_path / "hub")
    fresh = moe()
    nn.init.zeros_(fresh.lm_head.weight)
    for parameter in fresh.parameters():
        nn.init.zeros_(parameter)
    holdfast.load(tmp_path / "hub", {"model": fresh}, mapping="stacked")
    assert torch.equal(fresh(tokens).logits, logits)


def test_averages_and_masters_follow_their_parameter(tmp_path: Path) -> None:
    model = llama(dtype="float32")
    live = Fused(fused_of(model), model.config)
    average = holdfast.EMA(live, decay=0.5)
    for parameter in live.parameters():
        parameter.data.add_(1.0)
    average.update()
    state = {"model": live, "ema": average}
    truth = {key: value.tensor.clone() for key, value in average.holdfast_averages().items()}
    holdfast.save(tmp_path / "saved", state, mapping="llama-from-fused", model_dtype="bfloat16")
    opened = holdfast.open(tmp_path / "saved")
    for group in ("model", "master_weights", "ema/model"):
        assert set(opened.keys(group)) == set(model.state_dict()), group
    fresh = Fused({key: torch.zeros_like(value) for key, value in live.state_dict().items()}, model.config)
    other = holdfast.EMA(fresh, decay=0.5)
    holdfast.load(tmp_path / "saved", {"model": fresh, "ema": other}, mapping="llama-fused")
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in live.state_dict().items())
    found = other.holdfast_averages()
    assert all(torch.equal(found[key].tensor, value) for key, value in truth.items())


@pytest.mark.parametrize(
    ("mapping", "says"),
    [
        ("a -> , b", "column"),
        ("no-such-name", "did you mean|not a mapping"),
        (Path("missing.map"), "missing.map"),
        ("a -> b, dtype='bfloat16'", "line 1.*src_dtype"),
        ({"model": "a -> b", "critic": "a ->"}, "column"),
    ],
)
def test_a_run_refuses_a_mapping_that_cannot_be_before_it_starts(tmp_path: Path, mapping: Any, says: str) -> None:
    with pytest.raises((holdfast.InvalidArgument, holdfast.NotFound), match=says):
        holdfast.Checkpointer(tmp_path, mapping=mapping)


class Tied(nn.Module):
    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.add_module(first, nn.Embedding(5, 4))
        self.add_module(second, nn.Linear(4, 5, bias=False))
        getattr(self, second).weight = getattr(self, first).weight


def stepped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    sum((parameter**2).sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("names", [("E", "H"), ("H", "E")], ids=["as stored", "the other way round"])
def test_a_tied_model_has_one_state_through_a_mapping(tmp_path: Path, names: tuple[str, str]) -> None:
    model: Any = Tied("e", "h")
    optimizer = stepped(model)
    holdfast.save(tmp_path / "plain", {"model": model, "optimizer": optimizer})
    program = "e.weight -> E.weight\nh.weight -> H.weight"
    holdfast.save(tmp_path / "mapped", {"model": model, "optimizer": optimizer}, mapping=program)
    moments = [key for key in holdfast.open(tmp_path / "mapped").keys("optimizer") if key.endswith("exp_avg")]
    assert moments == ["E.weight/exp_avg"]
    ways = [(tmp_path / "plain", program), (tmp_path / "mapped", "E.weight -> E.weight\nH.weight -> H.weight")]
    for path, mapping in ways:
        live: Any = Tied(*names)
        again = torch.optim.AdamW(live.parameters())
        holdfast.load(path, {"model": live, "optimizer": again}, mapping=mapping)
        assert torch.equal(live.E.weight, model.e.weight)
        assert torch.equal(again.state[live.E.weight]["exp_avg"], optimizer.state[model.e.weight]["exp_avg"])
        assert again.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize("variant", ["fused", "fused-grouped", "megatron", "paddle"])
def test_a_tied_run_resumes_through_a_mapping(tmp_path: Path, variant: str) -> None:
    sizes = {**SIZES, "tie_word_embeddings": True}
    models = [transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)) for _ in range(2)]
    optimizers = [stepped(models[0]), torch.optim.AdamW(models[1].parameters())]
    with holdfast.Checkpointer(tmp_path, mapping=variant) as checkpointer:
        checkpointer.save(1, {"model": models[0], "optimizer": optimizers[0]}).result(60)
        assert checkpointer.restore({"model": models[1], "optimizer": optimizers[1]}) == 1
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizers[0].state[one]["exp_avg"], optimizers[1].state[two]["exp_avg"])


def test_a_source_that_nothing_used_is_not_replaced_in_silence(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": {"a": torch.ones(2), "b": torch.zeros(2)}})
    state = {"model": {"b": torch.full((2,), 7.0)}}
    with pytest.raises(holdfast.Mismatch, match=r"'b' is also a source.*b -> _"):
        holdfast.load(tmp_path / "c", state, mapping="a -> b")
    holdfast.load(tmp_path / "c", state, mapping="b -> _\na -> b")
    assert torch.equal(state["model"]["b"], torch.ones(2))
    swapped = {"model": {"a": torch.full((2,), 7.0), "b": torch.full((2,), 7.0)}}
    holdfast.load(tmp_path / "c", swapped, mapping="a -> t\nb -> a\nt -> b")
    assert torch.equal(swapped["model"]["a"], torch.zeros(2)) and torch.equal(swapped["model"]["b"], torch.ones(2))


def test_empty_and_single_tensors_go_through_a_mapping(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self, **shapes: tuple[int, ...]) -> None:
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    model = Small(e=(0, 4), a=(), b=(), w=(3, 2))
    optimizer = stepped(model)
    holdfast.save(tmp_path / "plain", {"model": model, "optimizer": optimizer})
    live = Small(e=(4, 0), s=(2,), v=(3, 2))
    again = torch.optim.AdamW(live.parameters())
    program = "e^T -> e\na, b -> s, axis=0, stack\nw -> v"
    holdfast.load(tmp_path / "plain", {"model": live, "optimizer": again}, mapping=program)
    assert again.state[live.s]["step"].shape == () and again.state[live.s]["exp_avg"].shape == (2,)
    again.step()
    holdfast.save(tmp_path / "mapped", {"model": model}, mapping="e^T -> ee")
    assert holdfast.open(tmp_path / "mapped").read("ee").shape == (4, 0)


def test_what_does_not_fit_may_be_left_out_through_a_mapping(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hub")
    truth = fused_of(llama())
    fewer = {key: torch.zeros_like(value) for key, value in truth.items() if ".layers.1." not in key}
    live = Fused(fewer, llama().config)
    with pytest.raises(holdfast.Mismatch, match="not a target"):
        holdfast.load(tmp_path / "hub", {"model": live}, mapping="fused")
    holdfast.load(tmp_path / "hub", {"model": live}, mapping="fused", ignore=["model.layers.1.*"])
    assert torch.equal(
        live.state_dict()["model.layers.0.self_attn.qkv_proj.weight"], truth["model.layers.0.self_attn.qkv_proj.weight"]
    )
    wrong = {key: torch.zeros(3) if "norm" in key else torch.zeros_like(value) for key, value in fewer.items()}
    with pytest.warns(HoldfastWarning, match="not all of the state was loaded"):
        report = holdfast.load(tmp_path / "hub", {"model": Fused(wrong, llama().config)}, mapping="fused", strict=False)
    assert report.mismatched and report.loaded


def test_a_kept_target_is_not_asked_of_the_file(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "c", {"model": {"a": torch.ones(2), "b": torch.zeros(2)}})
    state = {"model": {"a": torch.full((2,), 7.0), "b": torch.full((2,), 7.0)}}
    holdfast.load(tmp_path / "c", state, mapping="_ -> a")
    assert torch.equal(state["model"]["a"], torch.full((2,), 7.0)) and not state["model"]["b"].any()
    with holdfast.Checkpointer(tmp_path / "run", mapping="_ -> junk\na -> x") as checkpointer:
        checkpointer.save(1, state).result(60)
        state["model"]["a"].zero_()
        assert checkpointer.restore(state) == 1
    assert torch.equal(state["model"]["a"], torch.full((2,), 7.0))


def test_a_dict_of_tensors_goes_there_and_back_to_every_byte(tmp_path: Path) -> None:
    from holdfast.convert.mapping import MappingOptions
    from holdfast.convert.run import ConvertOptions, convert

    tensors = {name: torch.randn(4, 3) for name in ("z", "q", "k", "v", "a")}
    holdfast.save(tmp_path / "start", {"model": tensors})
    program = "q, k, v -> w, axis=0, sizes=[4, 4, 4]"
    convert(tmp_path / "start", tmp_path / "fused", ConvertOptions(mapping=MappingOptions(program)))
    convert(tmp_path / "fused", tmp_path / "back", ConvertOptions(mapping=MappingOptions(program, reverse=True)))
    for path in (tmp_path / "start").iterdir():
        if path.name != "holdfast.json":
            assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_run_with_a_mapping_saves_the_states_that_the_first_step_adds(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path / "run", mapping="0.weight, 1.weight -> both, axis=0") as checkpointer:
        checkpointer.save(0, state).result(60)  # planned without states
        sum(part(torch.ones(1, 3)).sum() for part in model).backward()
        optimizer.step()
        saved = checkpointer.save(1, state).result(60)
    assert {"both/exp_avg", "both/exp_avg_sq", "both/step", "1.bias/exp_avg"} <= set(saved.keys("optimizer"))
