"""Adapters extracted from tuned models: opened by PEFT, merged back, errors against the singular values."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.merging.lora.extract_adapter import ExtractOptions, extract_adapter
from holdfast.merging.lora.merge_lora_call import merge_lora
from holdfast.merging.lora.truncated_svd import thin_factors
from tests.cli.calls import call
from tests.merging import models
from tests.merging.lora import adapters

PT = {"format": "pt"}
LAYER = "model.layers.0.self_attn.q_proj.weight"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tuned(base: Path, path: Path, rank: int, *more: str) -> Path:
    """A model of which every linear weight was changed by a rank, and other tensors at random."""
    torch.manual_seed(2)
    model = adapters.opened(base)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("_proj.weight", "c_attn.weight", "c_fc.weight")):
                value.add_((torch.randn(value.shape[0], rank) @ torch.randn(rank, value.shape[1])) * 0.01)
            elif key in more:
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(path)
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_adapter_of_the_true_rank_is_the_tuned_model(tmp_path: Path, kind: str) -> None:
    base = getattr(adapters, kind)(tmp_path / "base", torch.float32)
    other = ("model.norm.weight",) if kind == "llama" else ("transformer.ln_f.weight", "transformer.ln_f.bias")
    after = tuned(base, tmp_path / "tuned", 4, *other)
    done = extract_adapter(ExtractOptions(str(base), str(after), 4), tmp_path / "adapter")
    assert len(done.errors) == (14 if kind == "llama" else 8)
    assert max(done.errors.values()) < 1e-4
    assert set(done.saved) == set(other)
    wanted = logits(adapters.opened(after))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = PeftModel.from_pretrained(adapters.opened(base), tmp_path / "adapter")
    assert torch.allclose(logits(peft), wanted, atol=1e-4)
    merge_lora(tmp_path / "adapter", tmp_path / "merged")
    merged = adapters.opened(tmp_path / "merged")
    assert torch.allclose(logits(merged), wanted, atol=1e-4)
    for key in other:
        assert torch.equal(merged.state_dict()[key], adapters.opened(after).state_dict()[key])


def opened_by_peft(base: Path, added: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = PeftModel.from_pretrained(adapters.opened(base), added)
    return model


def check_all_ways(base: Path, after: Path, tmp_path: Path) -> Any:
    """Extract an adapter. PEFT's model, PEFT's merge and ours must be the tuned model. Returns the merged model."""
    extract_adapter(ExtractOptions(str(base), str(after), 4), tmp_path / "adapter")
    wanted = logits(adapters.opened(after))
    model = opened_by_peft(base, tmp_path / "adapter")
    assert torch.allclose(logits(model), wanted, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unloaded = model.merge_and_unload()
    assert torch.allclose(logits(unloaded), wanted, atol=1e-4)
    merge_lora(tmp_path / "adapter", tmp_path / "merged", base=base)
    merged = adapters.opened(tmp_path / "merged")
    assert torch.allclose(logits(merged), wanted, atol=1e-4)
    return merged


@pytest.mark.parametrize(
    ("kind", "embedding"), [("llama", "model.embed_tokens.weight"), ("gpt2", "transformer.wte.weight")]
)
def test_embeddings_that_stay_tied_are_stored_with_the_head(tmp_path: Path, kind: str, embedding: str) -> None:
    """PEFT keeps the base's head beside embeddings that are stored alone."""
    options: dict[str, Any] = {"tied": True} if kind == "llama" else {}
    base = getattr(adapters, kind)(tmp_path / "base", torch.float32, **options)
    after = tuned(base, tmp_path / "tuned", 4, embedding)
    assert check_all_ways(base, after, tmp_path).config.tie_word_embeddings
    found, wanted = (load_all(tmp_path / name) for name in ("merged", "tuned"))
    assert found.keys() == wanted.keys()
    assert torch.equal(found[embedding], wanted[embedding])


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


BIASES = ("q_proj.bias", "v_proj.bias")


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("qwen2", ("q_proj.weight", "q_proj.bias")),
        ("qwen2", ("q_proj.weight", *BIASES, "input_layernorm.weight")),
        ("qwen2", BIASES),
        ("gpt2", ("c_attn.weight", "c_attn.bias", "ln_1.weight", "ln_2.bias", "ln_f.weight", "ln_f.bias")),
        ("gpt2", ("ln_f.weight", "c_fc.bias")),
        ("gpt2", ("wte.weight", "c_proj.weight", "c_proj.bias", "wpe.weight")),
    ],
)
def test_changed_biases_are_opened_by_peft(tmp_path: Path, family: str, changed: tuple[str, ...]) -> None:
    """A layer whose weight and bias changed; a module of which one tensor changed; biases alone."""
    base = models.write(tmp_path / "base", family, dtype=torch.float32, tied=family == "gpt2")
    (base / "generation_config.json").unlink()
    torch.manual_seed(2)
    model = adapters.opened(base)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key.endswith(("_proj.weight", "c_attn.weight")) and key.endswith(changed):
                value.add_((torch.randn(value.shape[0], 4) @ torch.randn(4, value.shape[1])) * 0.05)
            elif key.endswith(changed):
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(tmp_path / "tuned")
    merged = check_all_ways(base, tmp_path / "tuned", tmp_path)
    state = adapters.opened(tmp_path / "tuned").state_dict()
    for key in state:
        assert torch.allclose(merged.state_dict()[key], state[key], atol=1e-5), key
        if key.endswith(changed) and (key.endswith("bias") or "ln_" in key or "norm" in key):
            assert torch.equal(merged.state_dict()[key], state[key]), key


def untied(base: Path, path: Path, *keys: str) -> Path:
    """A model with a head of its own, of which some tensors were changed."""
    torch.manual_seed(2)
    model = adapters.opened(base)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        for key, value in model.named_parameters():
            if key in keys:
                value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("keys", [[HEAD], [EMBEDDING], [HEAD, EMBEDDING], [HEAD, "model.norm.weight"]])
def test_a_head_that_was_untied_in_training(tmp_path: Path, keys: list[str]) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32, tied=True)
    after = untied(base, tmp_path / "tuned", *keys)
    merged = check_all_ways(base, after, tmp_path)
    assert not merged.config.tie_word_embeddings
    state = adapters.opened(after).state_dict()
    assert all(torch.equal(merged.state_dict()[key], state[key]) for key in keys)


def test_a_head_that_was_tied_in_training(tmp_path: Path) -> None:
    base = untied(adapters.llama(tmp_path / "tied", torch.float32, tied=True), tmp_path / "base", LAYER)
    after = tuned(tmp_path / "tied", tmp_path / "tuned", 4, EMBEDDING)
    with torch.no_grad():
        wanted = logits(adapters.opened(after))
    extract_adapter(ExtractOptions(str(base), str(after), 96), tmp_path / "adapter")
    assert torch.allclose(logits(opened_by_peft(base, tmp_path / "adapter")), wanted, atol=1e-4)


def test_the_error_is_that_of_the_singular_values_left_out(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32)
    after = tuned(base, tmp_path / "tuned", 6)
    done = extract_adapter(ExtractOptions(str(base), str(after), 2), tmp_path / "adapter")
    difference = adapters.opened(after).state_dict()[LAYER] - adapters.opened(base).state_dict()[LAYER]
    values = torch.linalg.svdvals(difference.double())
    assert done.errors[LAYER] == pytest.approx(float(values[2:].norm() / values.norm()), rel=1e-4)
    found = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = f"base_model.model.{LAYER.removesuffix('.weight')}"
    product = found[f"{name}.lora_B.weight"] @ found[f"{name}.lora_A.weight"]
    assert float((difference - product).norm() / difference.norm()) == pytest.approx(done.errors[LAYER], rel=1e-4)


@pytest.mark.full
def test_a_large_matrix_is_decomposed_nearly_as_well(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.linspace(3, 1, 8), torch.full((92,), 0.01)])
    left, right = (torch.linalg.qr(torch.randn(size, 100))[0] for size in (2200, 2100))
    matrix = (left * values) @ right.T
    found = thin_factors(matrix, 8)
    assert found.error == pytest.approx(float(values[8:].norm() / values.norm()), rel=1e-2)
    again = thin_factors(matrix, 8)
    assert torch.equal(found.first, again.first)


def test_a_rank_beyond_a_matrix_is_its_own(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32)
    after = tuned(base, tmp_path / "tuned", 4)
    extract_adapter(ExtractOptions(str(base), str(after), 120), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 120
    assert set(config["rank_pattern"].values()) == {48, 96}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = PeftModel.from_pretrained(adapters.opened(base), tmp_path / "adapter")
    assert torch.allclose(logits(peft), logits(adapters.opened(after)), atol=1e-4)


def test_models_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base")
    with pytest.raises(NotFound, match="there is nothing to extract"):
        extract_adapter(ExtractOptions(str(base), str(base), 4), tmp_path / "adapter")
    other = tmp_path / "other"
    other.mkdir()
    save_file({"model.norm.weight": torch.ones(96)}, other / "model.safetensors")
    with pytest.raises(Mismatch, match="do not fit together"):
        extract_adapter(ExtractOptions(str(base), str(other), 4), tmp_path / "adapter")
    with pytest.raises(InvalidArgument, match="--rank 0"):
        ExtractOptions(str(base), str(other), 0)
    assert not (tmp_path / "adapter").exists()


def test_a_tensor_that_the_base_does_not_have_is_named(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32)
    after = tuned(base, tmp_path / "tuned", 4)
    save_file({**load_all(after), "model.value_head.weight": torch.ones(2, 96)}, after / "model.safetensors", PT)
    with pytest.raises(Mismatch, match=r"has 'model\.value_head\.weight', which no module of .* has.*--remove model"):
        extract_adapter(ExtractOptions(str(base), str(after), 4), tmp_path / "adapter")
    call("convert", after, tmp_path / "less", "--to", "hf", "--remove", "model.value_head.weight")
    assert extract_adapter(ExtractOptions(str(base), str(tmp_path / "less"), 4), tmp_path / "adapter").errors
    for name, value in (("zeros", 0.0), ("ones", 1.0)):
        (tmp_path / name).mkdir()
        save_file({**load_all(base), "extra": torch.full((2,), value)}, tmp_path / name / "model.safetensors", PT)
        (tmp_path / name / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(Unsupported, match="'extra' was changed, but belongs to no module"):
        extract_adapter(ExtractOptions(str(tmp_path / "zeros"), str(tmp_path / "ones"), 4), tmp_path / "other")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("key", [LAYER, "model.norm.weight", EMBEDDING])
@pytest.mark.parametrize("which", ["base", "tuned"])
def test_elements_that_are_not_finite_are_named(tmp_path: Path, value: float, key: str, which: str) -> None:
    base = adapters.llama(tmp_path / "base")
    tuned(base, tmp_path / "tuned", 4)
    file = next(file for file in (tmp_path / which).glob("*.safetensors") if key in load_file(file))
    tensors = load_file(file)
    tensors[key].view(-1)[3] = value
    save_file(tensors, file, PT)
    match = rf"'{key}' has NaN or infinite elements \(1\) in .*{which}, {file.name}"
    with pytest.raises(Unsupported, match=match):
        extract_adapter(ExtractOptions(str(base), str(tmp_path / "tuned"), 4), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_models_of_other_dtypes_or_sizes_name_the_way_out(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base")
    model = adapters.opened(tuned(base, tmp_path / "tuned", 4)).float()
    model.save_pretrained(tmp_path / "wide")
    with pytest.raises(Mismatch, match="cast one of them first: `holdfast convert TUNED DST --to hf --dtype bfloat16`"):
        extract_adapter(ExtractOptions(str(base), str(tmp_path / "wide"), 4), tmp_path / "adapter")
    call("convert", tmp_path / "wide", tmp_path / "cast", "--to", "hf", "--dtype", "bfloat16")
    extract_adapter(ExtractOptions(str(base), str(tmp_path / "cast"), 4), tmp_path / "adapter")
    model.bfloat16().resize_token_embeddings(303, mean_resizing=False)
    model.save_pretrained(tmp_path / "grown")
    with pytest.raises(Mismatch, match="resize the base first: `holdfast resize-vocab BASE DST --size 303`"):
        extract_adapter(ExtractOptions(str(base), str(tmp_path / "grown"), 4), tmp_path / "other")
    call("resize-vocab", base, tmp_path / "larger", "--size", 303)
    extract_adapter(ExtractOptions(str(tmp_path / "larger"), str(tmp_path / "grown"), 4), tmp_path / "other")


def test_the_command_prints_the_error_of_every_layer(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32)
    after = tuned(base, tmp_path / "tuned", 2, "model.norm.weight")
    done = call("extract-lora", base, after, tmp_path / "adapter", "--rank", 2)
    assert f"{LAYER}  0.0000\n" in done.output.replace("   ", "  ").replace("   ", "  ")
    assert "stored whole: model.norm.weight\n" in done.output
    fields = json.loads(call("extract-lora", base, after, tmp_path / "b", "--rank", 1, "--json").output)
    assert 0.1 < fields["errors"][LAYER] < 0.9
