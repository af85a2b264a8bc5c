"""Merged weights beside PEFT's merge_and_unload, bit for bit; DoRA within rounding."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.convert.computed import rows_per_band
from holdfast.merging.lora.merge_lora_call import merge_lora
from holdfast.merging.merge_stream import one_thread_per_operation
from tests.merging import models
from tests.merging.lora import adapters

LINEAR = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"target_modules": [*LINEAR, "embed_tokens", "lm_head"], "r": 5, "lora_alpha": 3},
    "rslora": {"use_rslora": True, "lora_alpha": 7, "target_modules": LINEAR},
    "patterns": {
        "target_modules": LINEAR,
        "rank_pattern": {r".*\.layers\.1\..*q_proj": 2, "k_proj": 13},
        "alpha_pattern": {"model.layers.0.self_attn.o_proj": 5, "down_proj": 1},
    },
    "embeddings": {"target_modules": ["embed_tokens"], "r": 3},
    "saved": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "tokens": {"trainable_token_indices": [0, 17, 299]},
    "tokens of a module": {"trainable_token_indices": {"embed_tokens": [5, 4]}},
    "bias": {"bias": "all"},
    "a large rank": {"r": 200, "target_modules": ["q_proj", "down_proj"]},
}


def compare(path: Path, wanted: dict[str, torch.Tensor]) -> Any:
    """Compare a merged folder with a state in memory. Returns the opened model."""
    loader: Any = AutoModelForCausalLM
    found, info = loader.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    state = found.state_dict()
    assert state.keys() == wanted.keys()
    for key, value in wanted.items():
        assert state[key].dtype == value.dtype, key
        assert torch.equal(state[key], value), key
    return found


@pytest.mark.sliced(3)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_a_llama_is_merged_to_the_last_bit(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    base = adapters.llama(tmp_path / "base", dtype)
    added = adapters.adapter(base, tmp_path / "adapter", **CASES[case])
    done = merge_lora(added, tmp_path / "merged", base=base, max_shard_size="150KB")
    assert done.changed
    model = compare(tmp_path / "merged", adapters.merged_by_peft(base, added))
    assert model.generation_config.eos_token_id == 7
    for name in ("generation_config.json", "config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in model.state_dict().values())


@pytest.mark.full
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_three_architectures_tied_or_not_sharded_or_not(
    tmp_path: Path, family: str, tied: bool, max_shard_size: str
) -> None:
    base = models.write(tmp_path / "base", family, tied=tied, max_shard_size=max_shard_size)
    assert (len(list(base.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    targets = ["c_attn", "c_fc", "c_proj", "wte"] if family == "gpt2" else [*LINEAR, "embed_tokens"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        added = adapters.adapter(base, tmp_path / "adapter", target_modules=targets, fan_in_fan_out=family == "gpt2")
    done = merge_lora(added, tmp_path / "merged", base=base, max_shard_size="40KB")
    assert len(done.changed) > 10
    compare(tmp_path / "merged", adapters.merged_by_peft(base, added))


@pytest.mark.parametrize("case", [{}, {"trainable_token_indices": [1, 2]}, {"target_modules": ["embed_tokens"]}])
def test_tied_embeddings_stay_tied(tmp_path: Path, case: dict[str, Any]) -> None:
    base = adapters.llama(tmp_path / "base", tied=True)
    added = adapters.adapter(base, tmp_path / "adapter", **case)
    merge_lora(added, tmp_path / "merged", base=base)
    compare(tmp_path / "merged", adapters.merged_by_peft(base, added))


@pytest.mark.parametrize("stated", [True, False])
def test_transposed_weights_of_gpt2(tmp_path: Path, stated: bool) -> None:
    """PEFT looks at the layer's class, whatever the config states: attn.c_proj is square, so its shape says nothing."""
    base = adapters.gpt2(tmp_path / "base")
    options: dict[str, Any] = {"target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        added = adapters.adapter(base, tmp_path / "adapter", **options)
    adapters.changed_config(added, fan_in_fan_out=stated)
    merge_lora(added, tmp_path / "merged", base=base)
    compare(tmp_path / "merged", adapters.merged_by_peft(base, added))


def test_several_adapters_follow_each_other_with_their_weights(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base")
    first = adapters.adapter(base, tmp_path / "first", target_modules=LINEAR)
    second = adapters.adapter(base, tmp_path / "second", seed=2, r=3, target_modules=["q_proj", "embed_tokens"])
    merge_lora([first, second], tmp_path / "merged", base=base)
    compare(tmp_path / "merged", adapters.merged_by_peft(base, first, second))
    merge_lora([first, second], tmp_path / "weighted", base=base, weights=[0.3, -1.7])
    compare(tmp_path / "weighted", adapters.merged_by_peft(base, first, second, weights=(0.3, -1.7)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_adapter_in_16_bits_is_computed_in_32(tmp_path: Path, dtype: str) -> None:
    base = adapters.llama(tmp_path / "base")
    added = adapters.adapter(base, tmp_path / "adapter", target_modules=[*LINEAR, "embed_tokens"])
    from safetensors.torch import load_file, save_file

    tensors = load_file(added / "adapter_model.safetensors")
    save_file(
        {key: value.to(getattr(torch, dtype)) for key, value in tensors.items()}, added / "adapter_model.safetensors"
    )
    merge_lora(added, tmp_path / "merged", base=base)
    compare(tmp_path / "merged", adapters.merged_by_peft(base, added))


@pytest.mark.parametrize(
    ("case", "tied"),
    [
        ({"modules_to_save": ["lm_head", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj", "embed_tokens", "lm_head"]}, False),
        ({"trainable_token_indices": [300, 301, 302]}, True),
        ({"target_modules": ["embed_tokens"]}, True),
    ],
)
def test_added_tokens_grow_the_vocabulary_in_one_call(tmp_path: Path, case: dict[str, Any], tied: bool) -> None:
    base = adapters.llama(tmp_path / "base", tied=tied)
    added = adapters.adapter(base, tmp_path / "adapter", adapters.grow(3), **case)
    (added / "tokenizer.json").write_text("{}")
    (base / "tokenizer.json").write_text("[]")
    done = merge_lora(added, tmp_path / "merged", base=base)
    model = compare(tmp_path / "merged", adapters.merged_by_peft(base, added, change=adapters.grow(3)))
    assert model.config.vocab_size == 303
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"
    assert any("the vocabulary grew to 303 rows" in note for note in done.notes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dora_is_equal_within_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    base = adapters.llama(tmp_path / "base", dtype)
    added = adapters.adapter(base, tmp_path / "a", use_dora=True, target_modules=[*LINEAR, "embed_tokens"])
    merge_lora(added, tmp_path / "merged", base=base)
    found, wanted = adapters.opened(tmp_path / "merged").state_dict(), adapters.merged_by_peft(base, added)
    before = adapters.opened(base).state_dict()
    relative = 2**-8 if dtype is torch.bfloat16 else 2**-20
    for key, value in wanted.items():
        assert torch.allclose(found[key].float(), value.float(), rtol=relative, atol=1e-7), key
    assert not torch.equal(found["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_dora_of_transposed_weights(tmp_path: Path) -> None:
    base = adapters.gpt2(tmp_path / "base", torch.float32)
    added = adapters.adapter(base, tmp_path / "a", use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True)
    merge_lora(added, tmp_path / "merged", base=base)
    found = adapters.opened(tmp_path / "merged").state_dict()
    for key, value in adapters.merged_by_peft(base, added).items():
        assert torch.allclose(found[key], value, rtol=2**-20, atol=1e-7), key


def test_the_merged_model_generates_what_peft_generates(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base", torch.float32)
    added = adapters.adapter(base, tmp_path / "adapter", target_modules=LINEAR)
    merge_lora(added, tmp_path / "merged", base=base)
    tokens = torch.tensor([[1, 2, 3]])
    found, wanted = (
        model.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        for model in (adapters.opened(tmp_path / "merged"), adapters.merged_model(base, added))
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", [(1000, 700), (4099, 300), (130, 9000), (64, 64), (17, 5000)])
@pytest.mark.parametrize("rank", [1, 8, 64, 300])
def test_products_in_bands_have_the_bits_of_whole_products(shape: tuple[int, int], rank: int) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(rank, shape[1]), torch.randn(shape[0], rank)
    whole, step = second @ first, rows_per_band(shape[1], 16)
    with one_thread_per_operation():
        for begin in range(0, shape[0], step):
            assert torch.equal(second[begin : begin + step] @ first, whole[begin : begin + step])
