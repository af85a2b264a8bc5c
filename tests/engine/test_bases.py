"""How a base model is stored: by reference only where that loses nothing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.adapters.peft_cases import SIZES, adapted, open_base, optimizer_of, quantized, train_step, write_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
peft = pytest.importorskip("peft", reason="peft is not installed: make setup")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("bases") / "base")


def fresh() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def saved(path: Path, model: Any, **options: Any) -> tuple[str, list[str]]:
    """Save a model; returns how its base is stored, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", holdfast.HoldfastWarning)
        checkpoint = holdfast.save(path, {"model": model}, **options)
    assert checkpoint.verify().good
    texts = [str(one.message) for one in caught if issubclass(one.category, holdfast.HoldfastWarning)]
    return checkpoint.manifest.bases["model"]["mode"], texts


def test_a_base_from_nowhere_is_saved_in_full_and_opens(tmp_path: Path) -> None:
    model = adapted(fresh(), "lora")
    assert saved(tmp_path / "x", model) == ("full", [])
    with pytest.raises(holdfast.Unsupported, match="came from no folder or repository"):
        holdfast.save(tmp_path / "y", {"model": model}, base="reference")
    from transformers import AutoModelForCausalLM

    model_class: Any = AutoModelForCausalLM
    opened, info = model_class.from_pretrained(tmp_path / "x" / "base", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with model.disable_adapter(), torch.no_grad():
        tokens = torch.arange(8).reshape(1, 8)
        assert torch.equal(opened(input_ids=tokens).logits, model(input_ids=tokens).logits)
    live = adapted(fresh(), "lora", seed=7)
    holdfast.load(tmp_path / "x", {"model": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["int8", "nf4", "8 bits"])
def test_a_base_that_is_quantized_in_memory_is_its_folder(tmp_path: Path, base: Path, kind: str) -> None:
    pytest.importorskip("torchao" if kind == "int8" else "bitsandbytes")
    model = adapted(quantized(open_base(base), kind), "lora")
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    checkpoint = holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer}, base="reference")
    assert checkpoint.groups == ("model", "optimizer") and checkpoint.verify().good
    expected = [train_step(model, optimizer, number) for number in (1, 2)]
    live = adapted(quantized(open_base(base), kind), "lora", seed=7)
    resumed = optimizer_of(live)
    holdfast.load(tmp_path / "x", {"model": live, "optimizer": resumed})
    assert [train_step(live, resumed, number) for number in (1, 2)] == expected
    with torch.no_grad():
        live.get_base_model().get_input_embeddings().weight[0] += 1
    with pytest.raises(holdfast.Mismatch, match=r"embed_tokens\.weight of the live base model differs"):
        holdfast.load(tmp_path / "x", {"model": live, "optimizer": resumed})


@pytest.mark.parametrize("kind", ["nf4", "8 bits"])
def test_a_base_of_bitsandbytes_is_not_stored_in_full_since_no_load_could_fill_it(
    tmp_path: Path, base: Path, kind: str
) -> None:
    pytest.importorskip("bitsandbytes")
    how = "bitsandbytes int8" if kind == "8 bits" else "bitsandbytes nf4"
    model = adapted(quantized(open_base(base), kind), "lora")
    with pytest.raises(holdfast.Unsupported, match=f"base='full'.*quantized as {how}.*base='none'"):
        holdfast.save(tmp_path / "x", {"model": model}, base="full")
    from_nowhere = quantized(fresh(), kind)
    with pytest.raises(holdfast.Unsupported, match=r"came from no folder.*no load could fill.*base='none'"):
        holdfast.save(tmp_path / "x", {"model": adapted(from_nowhere, "lora")})
    assert not (tmp_path / "x").exists()
    assert saved(tmp_path / "x", adapted(from_nowhere, "lora"), base="none") == ("none", [])


def test_a_base_that_torchao_quantized_is_stored_in_full_and_loads(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("torchao")
    model = adapted(quantized(open_base(base), "int8"), "lora")
    holdfast.save(tmp_path / "x", {"model": model}, base="full")
    live = adapted(quantized(open_base(base), "int8"), "lora", seed=7)
    assert holdfast.load(tmp_path / "x", {"model": live}).loaded
    tokens = torch.arange(8).reshape(1, 8)
    with torch.no_grad():
        assert torch.equal(live(input_ids=tokens).logits, model(input_ids=tokens).logits)


def test_only_the_adapters_without_a_base(tmp_path: Path) -> None:
    assert saved(tmp_path / "x", adapted(fresh(), "lora"), base="none") == ("none", [])
    report = holdfast.load(tmp_path / "x", {"model": adapted(fresh(), "lora")})
    assert any("does not say which base model" in note for note in report.notes)


def with_trained_head(base: Path) -> Any:
    model = adapted(open_base(base), "lora")
    model.base_model.model.lm_head.weight.requires_grad_(True)
    return model


def with_changed_weights(base: Path) -> Any:
    model = open_base(base)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    return adapted(model, "lora")


def with_pissa(base: Path) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa", task_type="CAUSAL_LM")
    return peft.get_peft_model(open_base(base), config)


def with_other_origin(base: Path) -> Any:
    model = fresh()
    model.name_or_path = str(base)
    return adapted(model, "lora")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_trained_head, "lm_head.weight of the base model is trained"),
        (with_changed_weights, "model.norm.weight of the base model differs"),
        (with_pissa, "q_proj.weight of the base model differs"),
        (with_other_origin, "of the base model differs"),
    ],
)
def test_what_a_reference_would_lose_is_saved_in_full(tmp_path: Path, base: Path, make: Any, reason: str) -> None:
    model = make(base)
    mode, texts = saved(tmp_path / "x", model)
    assert mode == "full" and len(texts) == 1 and reason in texts[0] and "stores the whole base" in texts[0]
    with pytest.raises((holdfast.Unsupported, holdfast.Mismatch), match=f"base='reference', but .*{reason}"):
        holdfast.save(tmp_path / "y", {"model": model}, base="reference")
    live = make(base)
    holdfast.load(tmp_path / "x", {"model": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in model.state_dict().items())


def test_a_base_that_is_trained_later_is_noticed(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora")
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": model, "optimizer": optimizer}).result(60)
        model.base_model.model.lm_head.weight.requires_grad_(True)
        with pytest.warns(holdfast.HoldfastWarning, match=r"lm_head\.weight of the base model is trained"):
            checkpointer.save(3, {"model": model, "optimizer": optimizer}).result(60)
    modes = [
        holdfast.open(tmp_path / "run" / f"step-{step:012d}").manifest.bases["model"]["mode"] for step in (1, 2, 3)
    ]
    assert modes == ["reference", "reference", "full"]


def test_a_merged_adapter_is_refused(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora")
    model.merge_adapter()
    with pytest.raises(holdfast.Unsupported, match=r"is merged into base_model.*unmerge_adapter"):
        holdfast.save(tmp_path / "x", {"model": model})


def test_resized_embeddings_and_a_cast_are_still_the_base(tmp_path: Path, base: Path) -> None:
    model = open_base(base, dtype=torch.bfloat16)
    model.resize_token_embeddings(SIZES["vocab_size"] + 3)
    model = adapted(model, "lora")
    assert saved(tmp_path / "x", model) == ("reference", [])
    assert "base_model.model.lm_head.weight" in holdfast.open(tmp_path / "x").keys("model")


def test_a_missing_head_is_not_in_the_folder(tmp_path: Path, base: Path) -> None:
    open_base(base).model.save_pretrained(tmp_path / "inner")
    mode, texts = saved(tmp_path / "x", adapted(open_base(tmp_path / "inner"), "lora"))
    assert mode == "full" and "lm_head.weight of the base model differs" in texts[0]


def test_buffers_that_training_changes_are_in_the_step(tmp_path: Path, base: Path) -> None:
    def make() -> Any:
        model = open_base(base)
        model.model.register_buffer("count", torch.zeros(2))
        return adapted(model, "lora")

    model = make()
    model.base_model.model.model.count.add_(5)
    assert saved(tmp_path / "x", model)[0] == "reference"
    live = make()
    holdfast.load(tmp_path / "x", {"model": live})
    assert live.base_model.model.model.count.tolist() == [5, 5]


def test_a_mapping_keeps_the_module_as_it_is(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora")
    with pytest.raises(holdfast.Unsupported, match="a mapping= names the tensors"):
        holdfast.save(tmp_path / "x", {"model": model}, base="none", mapping=["base_model.$KEY -> $KEY"])


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(holdfast.InvalidArgument, match="base='half': choose"):
        holdfast.save(tmp_path / "x", {"a": 1}, base="half")
    with pytest.raises(holdfast.InvalidArgument, match="base='half': choose"):
        holdfast.Checkpointer(tmp_path / "run", base="half")
