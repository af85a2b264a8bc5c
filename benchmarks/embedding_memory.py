"""How much memory a step of GradCache takes as its batch grows: it is that of one micro batch.

    python -m benchmarks.embedding_memory             # minutes: it encodes 8,192 texts twice
    python -m benchmarks.embedding_memory --tiny      # seconds, to see that it runs

A decoder of 102 million parameters, 74 of them in the embeddings of 96,000 tokens, takes one optimizer step (AdamW,
InfoNCE) on pairs of short texts, in a process of its own for each batch size; the peak is the largest resident set of
the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

import torch

from holdfast.train.embedding import GradCache, ReplicaEncoder
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.embedding.pooling import pool
from holdfast.train.layout import Layout
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.parallel_model import build


def sized(tiny: bool) -> ModelConfig:
    hidden, inner, layers, heads = (64, 128, 2, 4) if tiny else (768, 2048, 4, 12)
    return ModelConfig(
        vocab_size=1000 if tiny else 96_000,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
    )


def last_token(hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
    return pool(hidden, inputs["attention_mask"].bool(), "lasttoken")


def step(tiny: bool, batch: int, micro_batch: int, length: int) -> dict[str, float]:
    """Take one step; return the parameters, its time and the peak of this process."""
    config = sized(tiny)
    replica = build(config, Layout(), head=False)
    optimizer = replica.make_optimizer(lr=1e-5)
    cache = GradCache(ReplicaEncoder(replica, last_token), InfoNCE(0.05), micro_batch=micro_batch)
    ids = torch.randint(config.vocab_size, (2, batch, length))
    columns = [{"input_ids": column, "attention_mask": torch.ones_like(column)} for column in ids]
    began = time.perf_counter()
    cache.step(columns)
    optimizer.step()
    return {
        "batch": batch,
        "parameters": sum(p.numel() for p in replica.module.parameters()),
        "step_s": round(time.perf_counter() - began, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batches", type=int, nargs=2, default=(256, 4096), metavar=("SMALL", "LARGE"))
    parser.add_argument("--micro-batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=2, help="tokens of a text")
    options = parser.parse_args()
    found = []
    for batch in options.batches:
        with multiprocessing.get_context("spawn").Pool(1) as pool_of_one:  # a peak never falls within a process
            found.append(pool_of_one.apply(step, (options.tiny, batch, options.micro_batch, options.length)))
    small, large = (each["peak_mb"] for each in found)
    print(json.dumps({"torch": torch.__version__, "steps": found, "growth": round(large / small - 1, 4)}, indent=2))


if __name__ == "__main__":
    main()
