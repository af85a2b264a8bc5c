"""How long a step of GradCache takes beside sentence-transformers' cached loss, in one process.

    python -m benchmarks.embedding_steps              # minutes, on the CPU
    python -m benchmarks.embedding_steps --tiny       # seconds, to see that it runs

Both compute the gradients of InfoNCE over a batch of pairs in micro batches of as many rows, with the same model: BERT,
which transformers computes for both, and Qwen3, which is the trainer's decoder here. All texts are equally long, or
their lengths vary as those of documents do (log-normal, sigma 0.7). Steps are interleaved, and medians are compared;
losses and gradients are compared before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3Model
from transformers.utils import logging

import holdfast
from holdfast.train.embedding import EmbeddingModel, EmbeddingSettings, GradCache, open_embedding_model
from holdfast.train.embedding.losses import InfoNCE

MEDIAN, SIGMA = 16, 0.7
Step = Callable[[], torch.Tensor]


def write_models(folder: Path, *, tiny: bool) -> dict[str, Path]:
    """Write a random BERT and a random Qwen3 with a tokenizer of whole words."""
    words = 200 if tiny else 20_000
    sizes: dict[str, Any] = {
        "vocab_size": words + 4,
        "hidden_size": 32 if tiny else 384,
        "intermediate_size": 64 if tiny else 1536,
        "num_hidden_layers": 2 if tiny else 6,
        "num_attention_heads": 4 if tiny else 6,
    }
    none: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    models: dict[str, Any] = {
        "bert": lambda: BertModel(BertConfig(**sizes, **none)),
        "qwen3": lambda: Qwen3Model(Qwen3Config(**sizes, num_key_value_heads=2, head_dim=64)),
    }
    ids = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *map(str, range(words))])}
    for name, make in models.items():
        words_only = Tokenizer(WordLevel(ids, unk_token="[UNK]"))
        words_only.pre_tokenizer = WhitespaceSplit()
        words_only.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        make().save_pretrained(folder / name)
        PreTrainedTokenizerFast(
            tokenizer_object=words_only, pad_token="[PAD]", unk_token="[UNK]", model_max_length=512
        ).save_pretrained(folder / name)
    return {name: folder / name for name in models}


def texts(count: int, words: int, seed: int, *, mixed: bool) -> list[str]:
    draw = random.Random(seed)
    lengths = [
        min(128, max(2, round(MEDIAN * draw.lognormvariate(0, SIGMA)))) if mixed else MEDIAN for _ in range(count)
    ]
    return [" ".join(str(draw.randrange(words)) for _ in range(length)) for length in lengths]


def make_steps(ours: EmbeddingModel, folder: Path, columns: list[list[str]], micro: int) -> tuple[Step, Step, Any]:
    """Return a step of ours and one of sentence-transformers, with gradients from the same columns."""
    peer = SentenceTransformer(str(folder), device="cpu").train()
    cache = GradCache(ours.train(), InfoNCE(0.05), micro_batch=micro, sort=True)
    loss = CachedMultipleNegativesRankingLoss(peer, mini_batch_size=micro)
    features: list[Any] = [peer.preprocess(column) for column in columns]

    def our_step() -> torch.Tensor:
        ours.zero_grad()
        return cache.step([ours.tokenize(column) for column in columns])

    def their_step() -> torch.Tensor:
        peer.zero_grad()
        found = loss([dict(each) for each in features], torch.empty(0))
        found.backward()
        return found.detach()

    return our_step, their_step, peer


def timed(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def compare(folder: Path, columns: list[list[str]], micro: int, rounds: int) -> dict[str, Any]:
    settings = EmbeddingSettings(pooling="mean")
    ours = open_embedding_model(folder, settings)
    stored = folder.parent / f"{folder.name}-step"
    if not stored.exists():
        holdfast.save(stored, ours.state(), files=ours.files())
    our_step, their_step, peer = make_steps(ours, stored, columns, micro)
    found, truth = float(our_step()), float(their_step())
    squares = [
        sum(float(p.grad.double().square().sum()) for p in m.parameters() if p.grad is not None) for m in (ours, peer)
    ]
    off = [abs(found / truth - 1), abs((squares[0] / squares[1]) ** 0.5 - 1)]
    assert max(off) < 1e-4, off
    times: list[tuple[float, float]] = [(timed(our_step), timed(their_step)) for _ in range(rounds)]
    mine, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "ours_ms": round(mine * 1000, 1),
        "theirs_ms": round(theirs * 1000, 1),
        "ours_over_theirs": round(mine / theirs, 3),
        "of_rounds": [round(mine / theirs, 3) for mine, theirs in times],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    batch, micro = (24, 8) if options.tiny else (options.batch, options.micro_batch)
    found: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "batch": batch}
    with tempfile.TemporaryDirectory(prefix="holdfast-embedding-steps-") as folder:
        for name, path in write_models(Path(folder), tiny=options.tiny).items():
            for lengths in ("equal", "mixed"):
                columns = [texts(batch, 200, seed, mixed=lengths == "mixed") for seed in (1, 2)]
                case = f"{name}, {lengths} lengths"
                found[case] = compare(path, columns, micro, options.rounds)
                print(f"{case}: {found[case]['ours_over_theirs']} of their time", file=sys.stderr)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
