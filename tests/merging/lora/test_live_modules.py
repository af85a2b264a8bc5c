"""Adapters extracted from models of other architectures, opened by PEFT: names and classes of their modules."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.merging.lora.extract_adapter import ExtractOptions, extract_adapter
from holdfast.merging.lora.merge_lora_call import merge_lora
from tests.merging.lora import adapters
from tests.merging.lora.test_tied_head import check_merged, with_random_adapter

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
TEXT: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 64}
HALVES: dict[str, Any] = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 48))
}
BART: dict[str, Any] = {
    "d_model": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "eos_token_id": 2,
    **HALVES,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**VISION)
    return transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)


CASES: dict[str, tuple[str, Callable[[], Any], tuple[str, ...]]] = {
    "a head of another name": ("GPTNeoXForCausalLM", lambda: transformers.GPTNeoXConfig(**SIZES), ("lm_head", "dense")),
    "tied embeddings of T5": (
        "T5ForConditionalGeneration",
        lambda: transformers.T5Config(**T5),
        ("shared", "relative_attention_bias", "q.weight"),
    ),
    "tied embeddings of BART": (
        "BartForConditionalGeneration",
        lambda: transformers.BartConfig(**BART),
        ("shared", "q_proj"),
    ),
    "routers": (
        "MixtralForCausalLM",
        lambda: transformers.MixtralConfig(**TEXT, num_local_experts=4),
        ("mlp.gate.", "q_proj"),
    ),
    "linear layers that PEFT refuses": (
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64, state_size=4),
        ("out_proj", "in_proj", "conv1d"),
    ),
    "a classifier": (
        "LlamaForSequenceClassification",
        lambda: transformers.LlamaConfig(**{**TEXT, "num_labels": 3, "pad_token_id": 0}),
        ("q_proj", "score", "norm"),
    ),
    "a masked model": (
        "BertForMaskedLM",
        lambda: transformers.BertConfig(**SIZES),
        ("query", "word_embeddings", "LayerNorm"),
    ),
    "a linear layer of another class": (
        "FalconForCausalLM",
        lambda: transformers.FalconConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=64),
        ("query_key_value", "dense"),
    ),
    "a text model in another": ("LlavaForConditionalGeneration", llava, ("q_proj", "norm", "lm_head")),
}


def outputs(model: Any) -> torch.Tensor:
    fields: dict[str, Any] = {"input_ids": torch.arange(12)[None]}
    if model.config.is_encoder_decoder:
        fields["decoder_input_ids"] = torch.arange(6)[None]
    with torch.no_grad():
        found: torch.Tensor = model.eval()(**fields).logits
    return found


def opened(kind: Any, path: Path) -> Any:
    model, info = kind.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    return model


def pair(tmp_path: Path, case: str) -> tuple[Any, Path, Path]:
    """Save a model and one of which the case's tensors were changed. Returns the class and both folders."""
    name, make, changed = CASES[case]
    kind: Any = getattr(transformers, name)
    torch.manual_seed(0)
    kind(make()).float().save_pretrained(tmp_path / "base")
    model = kind.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        for key, value in model.named_parameters():
            if any(part in key for part in changed):
                value.add_(torch.randn_like(value) * 0.05)
    model.save_pretrained(tmp_path / "tuned")
    return kind, tmp_path / "base", tmp_path / "tuned"


@pytest.mark.parametrize("case", CASES)
def test_peft_opens_the_tuned_model(tmp_path: Path, case: str) -> None:
    kind, base, after = pair(tmp_path, case)
    done = extract_adapter(ExtractOptions(str(base), str(after), 64), tmp_path / "adapter")
    assert done.errors
    assert max(done.errors.values()) < 1e-4
    wanted = outputs(opened(kind, after))
    assert not torch.allclose(outputs(opened(kind, base)), wanted, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = PeftModel.from_pretrained(opened(kind, base), tmp_path / "adapter")
        assert torch.allclose(outputs(model), wanted, atol=1e-4)
        assert torch.allclose(outputs(model.merge_and_unload()), wanted, atol=1e-4)


@pytest.mark.parametrize("case", ["tied embeddings of T5", "routers", "a text model in another"])
def test_the_adapter_is_merged_back(tmp_path: Path, case: str) -> None:
    kind, base, after = pair(tmp_path, case)
    extract_adapter(ExtractOptions(str(base), str(after), 64), tmp_path / "adapter")
    merge_lora(tmp_path / "adapter", tmp_path / "merged", base=base)
    assert torch.allclose(outputs(opened(kind, tmp_path / "merged")), outputs(opened(kind, after)), atol=1e-4)


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**TEXT, head_dim=8)
    vision = transformers.SiglipVisionConfig(**VISION)
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, image_token_index=63, mm_tokens_per_image=4
    )


@pytest.mark.parametrize("options", [{"target_modules": ["q_proj"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_of_a_vision_model_has_the_names_of_its_modules(tmp_path: Path, options: dict[str, Any]) -> None:
    check_merge("LlavaForConditionalGeneration", llava(), tmp_path, options)


def test_tied_embeddings_of_a_vision_model(tmp_path: Path) -> None:
    check_merge("Gemma3ForConditionalGeneration", gemma3(), tmp_path, {"modules_to_save": ["embed_tokens"]})


def check_merge(name: str, config: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    """Merge an adapter of random numbers, and compare with PEFT."""
    kind: Any = getattr(transformers, name)
    base, added = tmp_path / "base", tmp_path / "adapter"
    fields: dict[str, Any] = {"target_modules": r".*language_model.*q_proj"} | options
    wanted = with_random_adapter(kind(config), base, added, **fields)
    merge_lora(added, tmp_path / "merged", base=base)
    check_merged(kind, tmp_path / "merged", wanted)


@pytest.mark.parametrize("case", ["tied embeddings of T5", "tied embeddings of BART"])
def test_shared_embeddings_that_were_trained_alone_are_refused(tmp_path: Path, case: str) -> None:
    name, make, _ = CASES[case]
    base, added = tmp_path / "base", tmp_path / "adapter"
    model = getattr(transformers, name)(make())
    with_random_adapter(model, base, added, target_modules=["q", "q_proj"], modules_to_save=["shared"])
    with pytest.raises(Mismatch, match=r"trains .*shared\.weight alone, which the base ties to other embeddings"):
        merge_lora(added, tmp_path / "merged", base=base)


def test_keys_without_the_prefix_of_the_model(tmp_path: Path) -> None:
    """GPT-2 on the hub has no "transformer." in its keys; its modules do."""
    base = adapters.gpt2(tmp_path / "base", torch.float32)
    model = adapters.opened(base)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.add_(0.05)
    model.save_pretrained(tmp_path / "tuned")
    for path in (base, tmp_path / "tuned"):
        file = path / "model.safetensors"
        tensors = {key.removeprefix("transformer."): value for key, value in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    extract_adapter(ExtractOptions(str(base), str(tmp_path / "tuned"), 4), tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = PeftModel.from_pretrained(adapters.opened(base), tmp_path / "adapter")
    assert torch.allclose(outputs(found), outputs(model), atol=1e-4)


def test_what_no_module_holds_as_it_is_stored_is_refused(tmp_path: Path) -> None:
    """transformers joins the experts of a file into one tensor."""
    kind, base, _ = pair(tmp_path, "routers")
    model = opened(kind, base)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.add_(0.05)
    model.save_pretrained(tmp_path / "experts")
    with pytest.raises(Unsupported, match=r"experts.* was changed, but belongs to no module"):
        extract_adapter(ExtractOptions(str(base), str(tmp_path / "experts"), 4), tmp_path / "adapter")


def test_a_model_of_unknown_modules_is_refused(tmp_path: Path) -> None:
    _, base, after = pair(tmp_path, "a classifier")
    for path in (base, after):
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**fields, "architectures": ["OwnModel"]}))
    with pytest.raises(Unsupported, match="names no architecture of transformers"):
        extract_adapter(ExtractOptions(str(base), str(after), 4), tmp_path / "adapter")


def test_without_transformers_plain_models_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, base, after = pair(tmp_path, "a head of another name")
    plain = adapters.llama(tmp_path / "plain", torch.float32)
    model = adapters.opened(plain)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(0.05)
        model.model.norm.weight.add_(0.05)
    model.save_pretrained(tmp_path / "tuned plain")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "transformers", None)
        with pytest.raises(Unsupported, match="need transformers, which is not installed"):
            extract_adapter(ExtractOptions(str(base), str(after), 4), tmp_path / "adapter")
        extract_adapter(ExtractOptions(str(plain), str(tmp_path / "tuned plain"), 4), tmp_path / "adapter")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = PeftModel.from_pretrained(adapters.opened(plain), tmp_path / "adapter")
    assert torch.allclose(outputs(found), outputs(model), atol=1e-4)
