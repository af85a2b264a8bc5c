"""Tiny models and tokenizers of transformers, made here: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

WORDS = ["<s>", "</s>", "<unk>", "the", "cat", "sat", "on", "a", "mat", "dog", "ran", "far", "away", "home", "new"]


def tokenizer(words: list[str] | None = None) -> Any:
    """A tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words or WORDS)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )


def causal_model(family: str = "llama", rows: int = len(WORDS), *, tied: bool = True, seed: int = 0) -> Any:
    """A causal model with a row for each word, or more."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {"vocab_size": rows, "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 1}
    if family == "gpt2":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval()


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]
