"""Runs of the embedding trainer for tests: tiny data and models, what a rank holds at the end, a kill in a step."""

from __future__ import annotations

import hashlib
import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from holdfast.core.names import step_folder
from holdfast.train.checkpoints import FOLDER
from holdfast.train.embedding.trainer import EmbeddingConfig, EmbeddingTrainer, parse_embedding_config
from holdfast.train.models.decoder import DecoderBlock
from holdfast.train.settings import apply_sets, read_toml
from tests.dist.harness import tell_parent
from tests.dist.resume_cases import held
from tests.train.embedding.tiny_models import WORDS, make_tokenizer

_CONFIG = """
[embedding]
pooling = "mean"
causal = false
prompts = {{ query = "find: " }}
include_prompt = false
dims = [8, 16]
[model]
{model}
[loss]
temperature = 0.2
learned = true
[data]
tokenizer = "{data}/tokenizer"
sets = [
    {{ files = ["{data}/pairs.jsonl"], weight = 2 }},
    {{ files = ["{data}/lists.jsonl"], weight = 1, negatives = 1 }},
]
[evaluation]
batch = 16
sets = [
    {{ name = "lists", rows = "{data}/lists.jsonl" }},
    {{ name = "graded", kind = "similarity", rows = "{data}/graded.jsonl" }},
]
[optimizer]
lr = 1e-2
eps = 1e-6
[schedule]
warmup_steps = 3
[train]
folder = "{folder}"
steps = 20
global_batch = 11
micro_batch = 6
[checkpoint]
every_steps = 9
keep_last = 0
at_end = false
[ema]
decay = 0.9
"""


_DECODER = """
family = "qwen3"
vocab_size = 32
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
initializer_range = 0.1
attention_dropout = 0.1
residual_dropout = 0.1
embedding_dropout = 0.1
"""


def write_data(folder: Path) -> Path:
    """Write a set of pairs, one with negatives, one with labels, and a tokenizer."""
    draw = random.Random(1)
    texts = iter({" ".join(draw.choices(WORDS[7:], k=draw.randint(2, 9))) for _ in range(400)})
    pairs = [{"query": next(texts), "positive": next(texts)} for _ in range(50)]
    lists = [
        {"query": next(texts), "positive": next(texts), "negatives": [next(texts), next(texts)]} for _ in range(30)
    ]
    graded = [{"query": next(texts), "positive": next(texts), "label": number} for number in range(9)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (("pairs", pairs), ("lists", lists), ("graded", graded)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_tokenizer("qwen3").save_pretrained(folder / "tokenizer")
    return folder


def config(
    folder: Path, data: Path, layout: dict[str, Any] | None = None, *, encoder: Path | None = None, **sets: Any
) -> EmbeddingConfig:
    """A run of a tiny decoder, or an encoder's folder; `sets` are settings with a double underscore for the point."""
    given = {f"layout.{name}": value for name, value in (layout or {}).items()}
    given |= {name.replace("__", "."): value for name, value in sets.items()}
    written = {name: json.dumps(value) if isinstance(value, bool) else value for name, value in given.items()}
    model = _DECODER if encoder is None else f'encoder = "{encoder}"'
    text = _CONFIG.format(data=data, folder=folder, model=model)
    return parse_embedding_config(apply_sets(read_toml(text, "case"), [f"{name}={v}" for name, v in written.items()]))


def holds(trainer: EmbeddingTrainer) -> dict[str, str]:
    """Digests of all that a rank has, the learned temperature and its optimizer state among them."""
    found: Any = trainer
    digests = held(found)
    inner = getattr(trainer.optimizer, "optim", trainer.optimizer)
    for key, parameter in trainer.loss.named_parameters():
        state = {"value": parameter.detach(), **inner.state.get(parameter, {})}
        digests |= {f"loss/{key}/{name}": _digest(value) for name, value in state.items()}
    return digests


def _digest(value: torch.Tensor) -> str:
    return hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()


def finish(settings: EmbeddingConfig) -> tuple[int, dict[str, str]]:
    """Train to the end; the step it resumed from, and what this rank has then."""
    trainer = EmbeddingTrainer(settings)
    outcome = trainer.run()
    assert outcome.step == settings.train.steps
    return outcome.resumed_from, holds(trainer)


def train_until_killed(settings: EmbeddingConfig, hold_at: int) -> None:
    """Train, and wait in a step for the kill: after the gradients of some micro batches, and before those of others.

    A stage of a pipeline says so at its first micro batch: the next one waits for it there.
    """
    trainer = EmbeddingTrainer(settings)
    published = Path(settings.train.folder) / FOLDER / step_folder(settings.checkpoint.every_steps)
    seen = 0

    def wait(*_: Any) -> None:
        nonlocal seen
        if trainer.streams.step != hold_at - 1 or not torch.is_grad_enabled():
            return
        seen += 1
        staged = trainer.replica.pipeline is not None
        if seen == (1 if staged else 2):
            while not published.exists():  # the parent's deadline ends it
                time.sleep(0.01)
            tell_parent("held")
        if seen == 2:
            time.sleep(600)

    blocks = (module for module in trainer.replica.module.modules() if isinstance(module, DecoderBlock))
    first = next(blocks, trainer.replica.module)  # an encoder of transformers itself
    first.register_forward_pre_hook(wait)
    trainer.run()
