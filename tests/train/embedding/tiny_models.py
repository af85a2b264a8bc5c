"""Tiny random models in folders of the hub, with tokenizers that put tokens around a text as those of the hub do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)

WIDTH = 32
WORDS = "[PAD] [UNK] [CLS] [SEP] <end> find: passage: the a cat dog sat ran on under mat tree and then slept".split()
TEXTS = ["the cat sat", "a dog ran under the tree and then slept", "cat", "the dog and the cat sat on a mat"]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
TOKENS: dict[str, Any] = {"pad_token_id": 0, "cls_token_id": 2, "bos_token_id": 2, "sep_token_id": 3, "eos_token_id": 3}
ENCLOSED = ("bert", "modernbert")  # the families whose texts are between [CLS] and [SEP]
MODELS: dict[str, Any] = {
    "qwen2": lambda: Qwen2Model(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "qwen3": lambda: Qwen3Model(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "modernbert": lambda: ModernBertModel(
        ModernBertConfig(**SIZES, **TOKENS, local_attention=8, attention_dropout=0.1, mlp_dropout=0.1)
    ),
}


def make_tokenizer(family: str, side: str = "right") -> PreTrainedTokenizerFast:
    """Return a tokenizer that ends a text with <end>, or has it between [CLS] and [SEP]."""
    ids = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    template, special = ("[CLS] $A [SEP]", ["[CLS]", "[SEP]"]) if family in ENCLOSED else ("$A <end>", ["<end>"])
    words.post_processor = TemplateProcessing(
        single=template, special_tokens=[(token, ids[token]) for token in special]
    )
    named = {"cls_token": "[CLS]", "sep_token": "[SEP]"} if family in ENCLOSED else {"eos_token": "<end>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", padding_side=side, model_max_length=48, **named
    )


def write_model(folder: Path, family: str, side: str = "right", seed: int = 0, **config: Any) -> Path:
    """Save a model and its tokenizer as transformers does: without a head and without `model.` in the names."""
    torch.manual_seed(seed)
    model = MODELS[family]().eval()
    for name, value in config.items():
        setattr(model.config, name, value)
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or "bias" in name:  # else ones and zeros, which hide a mistake
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.1)
    model.save_pretrained(folder)
    make_tokenizer(family, side).save_pretrained(folder)
    return folder


def largest_distance(found: torch.Tensor, truth: Any) -> float:
    """Return the largest ||difference|| / ||truth|| of any row."""
    truth = torch.as_tensor(truth)
    return float(((found - truth).norm(dim=1) / truth.norm(dim=1)).max())


def distance_of_gradients(found: torch.nn.Module, truth: torch.nn.Module) -> float:
    """Return ||difference|| / ||truth|| over the gradients of all parameters that have one."""
    pairs = zip(found.parameters(), truth.parameters(), strict=True)
    both = [(ours.grad, other.grad) for ours, other in pairs if ours.grad is not None and other.grad is not None]
    difference = sum(float((ours - other).square().sum()) for ours, other in both)
    return (difference / sum(float(other.square().sum()) for _, other in both)) ** 0.5
