"""Runs of TRL's trainers with Holdfast, for ranks that the launcher forks."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from holdfast.integrations.transformers import attach
from tests.integrations.trainer_runs import Batches, make_arguments, make_model, train

WORDS = 48


class NotedSFT(Batches, SFTTrainer):
    """SFTTrainer, noting its batches."""


class NotedGRPO(Batches, GRPOTrainer):
    """GRPOTrainer, noting its batches."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{index}": index + 3 for index in range(WORDS)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def sentences(count: int, length: int) -> list[str]:
    numbers = torch.randint(0, WORDS, (count, length), generator=torch.Generator().manual_seed(5))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]


def prefer_even(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def run_sft(folder: str, changes: dict[str, Any], lora: bool, kill_step: int | None = None) -> dict[str, Any]:
    arguments = make_arguments(folder, SFTConfig, **({"max_length": 32, "num_train_epochs": 1.5} | changes))
    peft = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1) if lora else None
    trainer = NotedSFT(
        model=make_model(),
        args=arguments,
        train_dataset=Dataset.from_dict({"text": sentences(26, 12)}),
        processing_class=make_tokenizer(),
        peft_config=peft,
    )
    attach(trainer)
    return train(trainer, folder, True, kill_step)


def run_grpo(folder: str, changes: dict[str, Any], kill_step: int | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "steps_per_generation": 4,
        "max_completion_length": 6,
        "max_steps": 10,
        "save_steps": 3,
        "beta": 0.0,
    }
    trainer = NotedGRPO(
        model=make_model(),
        args=make_arguments(folder, GRPOConfig, **(options | changes)),
        train_dataset=Dataset.from_dict({"prompt": sentences(16, 4)}),
        processing_class=make_tokenizer(),
        reward_funcs=prefer_even,
    )
    attach(trainer)
    return train(trainer, folder, True, kill_step)
