"""Tiny models of three architectures in Hugging Face folders: a base and models trained from it, tied and untied."""

import functools
import json
from pathlib import Path

import safetensors.torch
import torch

SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def make(family: str, *, tied: bool):
    import transformers

    torch.manual_seed(11)
    if family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=96, n_positions=64, n_embd=32, n_layer=3, n_head=4, tie_word_embeddings=tied
        )
        return transformers.GPT2LMHeadModel(config)
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    }[family]
    return model_class(config_class(**SIZES, **HEADS, tie_word_embeddings=tied))


@functools.cache
def _weights(family: str, tied: bool) -> dict[str, torch.Tensor]:
    """The weights of a base; every tensor has elements that are far apart, also the norms."""
    weights = {key: value.detach().clone() for key, value in make(family, tied=tied).state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    return {key: value + 0.1 * torch.randn(value.shape, generator=generator) for key, value in weights.items()}


def write(
    path: Path,
    family: str = "llama",
    *,
    seed: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_size: str = "5GB",
) -> Path:
    """Write the base, or, with a seed, a model trained from it, with a generation config and a tokenizer."""
    model = make(family, tied=tied)
    state = dict(_weights(family, tied))
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        state = {key: value + 0.02 * torch.randn(value.shape, generator=generator) for key, value in state.items()}
    model.load_state_dict(state)
    if tied:
        model.tie_weights()
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    (path / "tokenizer_config.json").write_text('{"model_max_length":64,  "padding_side": "left"}')
    (path / "generation_config.json").write_text('{"temperature":0.7,\n "eos_token_id": 2}\n')
    return path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder of safetensors."""
    out: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = safetensors.torch.load_file(file)
        assert not out.keys() & found.keys()
        out |= found
    return out


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two models have the same keys, dtypes and bits."""
    if a.keys() != b.keys():
        return False
    return all(a[k].dtype == b[k].dtype and torch.equal(bits(a[k]), bits(b[k])) for k in a)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def indexed(folder: Path) -> None:
    """Check the index of a folder against its files: all keys, and the sum of the bytes in the headers."""
    found = tensors(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
        return
    fields = json.loads(index.read_text())
    assert fields["weight_map"].keys() == found.keys()
    assert fields["metadata"]["total_size"] == sum(tensor.numel() * tensor.element_size() for tensor in found.values())
