"""Adapters of models whose head is tied to the embeddings, beside PEFT: who keeps which weight."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaModel,
    RobertaForMaskedLM,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import holdfast
from holdfast.core.errors import Mismatch
from holdfast.merging.lora.merge_lora_call import merge_lora
from tests.merging.lora import adapters
from tests.merging.lora.test_beside_peft import compare

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


def with_adapter(base: Path, added: Path) -> Any:
    """The model as PEFT runs it with an adapter that is not merged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = PeftModel.from_pretrained(adapters.opened(base), added)
    return model


@pytest.mark.parametrize(
    ("case", "tied"),
    [
        ({"modules_to_save": ["embed_tokens"]}, False),
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
        ({"modules_to_save": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}, True),
        ({"modules_to_save": ["embed_tokens"], "target_modules": ["q_proj", "lm_head"]}, False),
        ({"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}}, True),
        ({"trainable_token_indices": [1, 2], "ensure_weight_tying": True}, True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_model_is_what_peft_makes_of_it(
    tmp_path: Path, case: dict[str, Any], tied: bool, dtype: torch.dtype
) -> None:
    base = adapters.llama(tmp_path / "base", dtype, tied=True)
    added = adapters.adapter(base, tmp_path / "adapter", **case)
    done = merge_lora(added, tmp_path / "merged", base=base)
    wanted = adapters.merged_model(base, added)
    found = compare(tmp_path / "merged", wanted.state_dict())
    assert found.config.tie_word_embeddings is wanted.config.tie_word_embeddings is tied
    assert torch.equal(logits(found), logits(wanted))
    record = json.loads((tmp_path / "merged" / "merge_record.json").read_text())
    assert record["notes"] == list(done.notes)


def test_the_embeddings_of_gpt2_that_were_trained_alone(tmp_path: Path) -> None:
    base = adapters.gpt2(tmp_path / "base")
    added = adapters.adapter(base, tmp_path / "adapter", target_modules=["c_attn"], modules_to_save=["wte"])
    done = merge_lora(added, tmp_path / "merged", base=base)
    compare(tmp_path / "merged", adapters.merged_by_peft(base, added))
    assert "trains transformer.wte.weight alone" in done.notes[0]


@pytest.mark.parametrize(
    "case",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [2, 5]}},
        {"trainable_token_indices": {"lm_head": [2, 5]}},
    ],
)
def test_a_head_that_was_changed_on_its_own_is_that_of_the_adapter(tmp_path: Path, case: dict[str, Any]) -> None:
    """PEFT's merge changes the embeddings too; its model before the merge is the one that was trained."""
    base = adapters.llama(tmp_path / "base", torch.float32, tied=True)
    added = adapters.adapter(base, tmp_path / "adapter", **case)
    done = merge_lora(added, tmp_path / "merged", base=base)
    assert any("changes lm_head.weight apart from model.embed_tokens.weight" in note for note in done.notes)
    found = adapters.opened(tmp_path / "merged")
    assert torch.allclose(logits(found), logits(with_adapter(base, added)), atol=1e-5)
    assert not found.config.tie_word_embeddings


def test_lora_on_the_embeddings_is_merged_into_both_and_noted(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", tied=True)
    added = adapters.adapter(base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"])
    done = merge_lora(added, tmp_path / "merged", base=base)
    assert compare(tmp_path / "merged", adapters.merged_by_peft(base, added)).config.tie_word_embeddings
    assert any("merged into the tied head too, as PEFT's merge_and_unload does it" in note for note in done.notes)


@pytest.mark.parametrize("kind", ["copy", "alias"])
def test_a_tie_that_is_stored_in_another_way(tmp_path: Path, kind: str) -> None:
    """A head that is stored as a copy of the embeddings, and a Holdfast checkpoint that records the tie."""
    base = adapters.llama(tmp_path / "base", tied=True)
    cases: list[dict[str, Any]] = [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["embed_tokens"]},
    ]
    added = [adapters.adapter(base, tmp_path / f"adapter-{n}", **case) for n, case in enumerate(cases)]
    wanted = [adapters.merged_by_peft(base, each) for each in added]
    other = tmp_path / "other"
    if kind == "alias":
        holdfast.save(other, {"model": adapters.opened(base)})
    else:
        other.mkdir()
        tensors = {key: value for file in base.glob("*.safetensors") for key, value in load_file(file).items()}
        save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, other / "model.safetensors", {"format": "pt"})
        (other / "config.json").write_bytes((base / "config.json").read_bytes())
    for number, state in enumerate(wanted):
        merge_lora(added[number], tmp_path / f"merged-{number}", base=other)
        compare(tmp_path / f"merged-{number}", state)


def test_tied_lora_matrices_are_refused(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", tied=True)
    added = adapters.adapter(
        base, tmp_path / "adapter", target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True
    )
    with pytest.raises(Mismatch, match=r"LoRA matrices that are tied \(ensure_weight_tying\)"):
        merge_lora(added, tmp_path / "merged", base=base)


def test_embeddings_that_grew_and_were_trained_alone(tmp_path: Path) -> None:
    """PEFT stores the resized head beside them, which then has the rows."""
    base = adapters.llama(tmp_path / "base", tied=True)
    added = adapters.adapter(base, tmp_path / "adapter", adapters.grow(3), modules_to_save=["embed_tokens"])
    merge_lora(added, tmp_path / "merged", base=base)
    found = compare(tmp_path / "merged", adapters.merged_by_peft(base, added, change=adapters.grow(3)))
    assert found.config.vocab_size == 303


def test_a_model_without_a_head_gets_none(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "vocab_size": 300, "num_hidden_layers": 1}
    model: Any = LlamaModel(LlamaConfig(num_attention_heads=4, tie_word_embeddings=True, **sizes))
    model.save_pretrained(tmp_path / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned: Any = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens"]))
        tuned.save_pretrained(tmp_path / "adapter")
    merge_lora(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "base")
    keys = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert keys == load_file(tmp_path / "base" / "model.safetensors").keys()


def encoder_fields(**fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return {**sizes, "vocab_size": 64, **fields}


def with_random_adapter(model: Any, base: Path, path: Path, **options: Any) -> Any:
    """Save a base and an adapter of random numbers. Returns PEFT's merged model."""
    model.save_pretrained(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned: Any = get_peft_model(type(model).from_pretrained(base), LoraConfig(r=4, **options))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
        tuned.save_pretrained(path)
        return PeftModel.from_pretrained(type(model).from_pretrained(base), path).merge_and_unload()


def check_merged(kind: Any, path: Path, wanted: Any) -> None:
    found, info = kind.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    for key, value in wanted.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key


def test_the_head_of_whisper_has_a_name_of_its_own(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
    }
    ids: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        vocab_size=64, d_model=32, num_mel_bins=8, max_source_positions=10, max_target_positions=20, **sizes, **ids
    )
    base, added = tmp_path / "base", tmp_path / "adapter"
    options: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    wanted = with_random_adapter(WhisperForConditionalGeneration(config), base, added, **options)
    merge_lora(added, tmp_path / "merged", base=base)
    check_merged(WhisperForConditionalGeneration, tmp_path / "merged", wanted)


@pytest.mark.parametrize("kind", [BertForMaskedLM, RobertaForMaskedLM])
def test_a_tied_head_of_unknown_name_is_no_tensor_of_its_own(tmp_path: Path, kind: Any) -> None:
    base, added = tmp_path / "base", tmp_path / "adapter"
    model = kind(kind.config_class(**encoder_fields()))
    with_random_adapter(model, base, added, target_modules=["query"], modules_to_save=["word_embeddings"])
    with pytest.raises(Mismatch, match=r"trains .*word_embeddings\.weight alone, .* whose name is not known"):
        merge_lora(added, tmp_path / "merged", base=base)


def test_a_model_of_multiple_choice_gets_no_head(tmp_path: Path) -> None:
    base, added = tmp_path / "base", tmp_path / "adapter"
    model = BertForMultipleChoice(BertConfig(**encoder_fields()))
    options: dict[str, Any] = {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]}
    wanted = with_random_adapter(model, base, added, **options)
    merge_lora(added, tmp_path / "merged", base=base)
    check_merged(BertForMultipleChoice, tmp_path / "merged", wanted)


@pytest.mark.parametrize(
    ("options", "tied"),
    [
        ({"modules_to_save": ["lm_head"]}, False),
        ({"modules_to_save": ["lm_head"]}, True),
        ({"target_modules": ["query_key_value", "lm_head"]}, False),
        ({"modules_to_save": ["embed_in"]}, True),
    ],
)
def test_the_lm_head_of_pythia_is_stored_as_embed_out(tmp_path: Path, options: dict[str, Any], tied: bool) -> None:
    base, added = tmp_path / "base", tmp_path / "adapter"
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**encoder_fields(tie_word_embeddings=tied)))
    wanted = with_random_adapter(model, base, added, **{"target_modules": ["query_key_value"]} | options)
    merge_lora(added, tmp_path / "merged", base=base)
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / "model.safetensors")
    check_merged(GPTNeoXForCausalLM, tmp_path / "merged", wanted)


def test_a_head_that_the_base_does_not_have_is_named(tmp_path: Path) -> None:
    """A base whose head is stored under a name that is not known."""
    base = adapters.llama(tmp_path / "base", torch.float32)
    added = adapters.adapter(base, tmp_path / "adapter", modules_to_save=["lm_head"])
    for file in base.glob("*.safetensors"):
        save_file({key.replace("lm_head", "output"): value for key, value in load_file(file).items()}, file)
    index = base / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("lm_head", "output"))
    with pytest.raises(Mismatch, match=r"has no 'lm_head\.weight'"):
        merge_lora(added, tmp_path / "merged", base=base)
