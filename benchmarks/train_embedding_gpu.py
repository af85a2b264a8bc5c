"""How fast an embedding model of half a billion parameters trains on a GPU, beside the same algorithm in plain torch.

    python -m benchmarks.train_embedding_gpu             # needs a CUDA device with some 80 GB
    python -m benchmarks.train_embedding_gpu --tiny      # the same on a CPU, to see that it runs

Both train a decoder with the sizes of Qwen2.5-0.5B with GradCache: fp32 parameters, bf16 activations, AdamW, InfoNCE
over a batch of 1,024 pairs. Plain torch has `torch.autocast` and padded batches: micro batches of `--micro-batch` rows,
in the order in which rows come, padded to the longest row of the batch, or of the micro batch. Ours is what
`holdfast train` runs with `train.micro_tokens`, as many tokens as the largest of those micro batches has: rows are
sorted by length. All begin with the same weights and see the same batches; the losses and gradients of the first batch
are compared.

Lengths are log-normal, as those of questions and passages are: a query has 16 tokens in the median (sigma 0.5), a
document 96 (sigma 0.7), at least 4 and at most 512. Steps of the three are interleaved, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from holdfast.train.embedding import GradCache, ReplicaEncoder
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.embedding.pooling import pool, unit_vectors
from holdfast.train.layout import Layout
from holdfast.train.models.attention import rotate, rotation
from holdfast.train.models.mixed_precision_layers import RMSNorm
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.parallel_model import build

TEMPERATURE, LR, CLIP = 0.05, 1e-5, 1.0
MEDIANS, SIGMAS = (16, 96), (0.5, 0.7)  # of queries and documents
Column = dict[str, torch.Tensor]


def sized(tiny: bool) -> ModelConfig:
    if tiny:
        vocabulary, hidden, inner, layers, heads = 512, 64, 160, 2, 4
    else:
        vocabulary, hidden, inner, layers, heads = 151_936, 896, 4864, 24, 14
    return ModelConfig(
        family="qwen2",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


def batch(config: ModelConfig, rows: int, longest: int, seed: int, device: torch.device) -> list[Column]:
    """Return queries and documents, padded to the longest of each."""
    draw = torch.Generator().manual_seed(seed)
    columns = []
    for median, sigma in zip(MEDIANS, SIGMAS, strict=True):
        found = (torch.randn(rows, generator=draw) * sigma + math.log(median)).exp().round().clamp(4, longest).long()
        mask = (torch.arange(int(found.max())) < found[:, None]).long()
        ids = torch.randint(config.vocab_size, mask.shape, generator=draw) * mask
        columns.append({"input_ids": ids.to(device), "attention_mask": mask.to(device)})
    return columns


class PlainBlock(nn.Module):
    """A layer as plain torch has it: torch's modules in fp32, for autocast, and norms that use the fused kernel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, size, inner = config.hidden_size, config.head_dim, config.intermediate_size
        self.size = size
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * size)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * size)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * size)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=False)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(hidden, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, by: Any) -> torch.Tensor:
        normed = self.input_layernorm(x)
        q, k, v = (each(normed).unflatten(-1, (-1, self.size)) for each in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in (rotate(q, by), rotate(k, by), v))
        # Padding follows the tokens, so that the causal kernel needs no mask.
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class PlainModel(nn.Module):
    """The decoder in plain torch; the vector of a text is its last token's, scaled to length one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, inputs: Column) -> torch.Tensor:
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        x = self.embed_tokens(ids).to(torch.bfloat16)
        by = rotation(self.config, ids.shape[1], ids.device)
        for layer in self.layers:
            x = layer(x, by)
        last = self.norm(x)[torch.arange(len(ids), device=ids.device), mask.sum(1) - 1]
        return functional.normalize(last.float(), dim=1)


@dataclass(slots=True)
class Plain:
    """GradCache in plain torch over a model and its optimizer."""

    model: PlainModel
    optimizer: torch.optim.Optimizer
    rows: int
    trim: bool

    def micro_batches(self, columns: list[Column]) -> list[list[Column]]:
        return [
            [self._part(column, begin) for begin in range(0, len(column["input_ids"]), self.rows)] for column in columns
        ]

    def _part(self, column: Column, begin: int) -> Column:
        mask = column["attention_mask"][begin : begin + self.rows]
        width = int(mask.sum(1).max()) if self.trim else mask.shape[1]
        return {name: values[begin : begin + self.rows, :width] for name, values in column.items()}

    def gradients(self, columns: list[Column]) -> torch.Tensor:
        parts = self.micro_batches(columns)
        kind = columns[0]["input_ids"].device.type
        with torch.no_grad(), torch.autocast(kind, torch.bfloat16):
            vectors = [torch.cat([self.model(part) for part in column]).requires_grad_() for column in parts]
        scores = vectors[0] @ vectors[1].T / TEMPERATURE
        loss = functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        loss.backward()
        for column, leaf in zip(parts, vectors, strict=True):
            assert leaf.grad is not None
            for part, gradient in zip(column, leaf.grad.split(self.rows), strict=True):
                with torch.autocast(kind, torch.bfloat16):
                    vector = self.model(part)
                vector.backward(gradient)
        return loss.detach()

    def step(self, columns: list[Column]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients(columns)
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss


class Ours:
    """GradCache of Holdfast with the trainer's model, as `holdfast train` runs it."""

    def __init__(self, config: ModelConfig, device: torch.device, tokens: int) -> None:
        self.replica = build(config, Layout(), device, torch.bfloat16, head=False)
        self.optimizer = self.replica.make_optimizer(lr=LR, fused=True)
        self.cache = GradCache(
            ReplicaEncoder(self.replica, self._pool), InfoNCE(TEMPERATURE).to(device), micro_tokens=tokens
        )

    @staticmethod
    def _pool(hidden: torch.Tensor, inputs: Any) -> torch.Tensor:
        return unit_vectors(pool(hidden, inputs["attention_mask"].bool(), "lasttoken").float())

    def gradients(self, columns: list[Column]) -> torch.Tensor:
        return self.cache.step(columns)

    def step(self, columns: list[Column]) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.gradients(columns)
        self.replica.clip(CLIP)
        self.optimizer.step()
        return loss


def same_weights(model: PlainModel, ours: Ours) -> None:
    state = {
        name.replace("self_attn.", "").replace("mlp.", ""): value
        for name, value in ours.replica.module.model.state_dict().items()
    }
    model.load_state_dict(state)


def differences(ours: Ours, plain: Plain, columns: list[Column]) -> dict[str, float]:
    """Compare the loss and the norm of the gradients; bf16 rounds differently where shapes differ."""
    found, truth = float(ours.gradients(columns)), float(plain.gradients(columns))
    norm = ours.replica.gradient_norm()
    expected = float(nn.utils.get_total_norm([p.grad for p in plain.model.parameters() if p.grad is not None]))
    ours.optimizer.zero_grad()
    plain.optimizer.zero_grad()
    off = {"loss": abs(found / truth - 1), "gradient_norm": abs(norm / expected - 1)}
    assert max(off.values()) < 0.03, off
    return {name: round(value, 5) for name, value in off.items()}


def timed(step: Callable[[list[Column]], Any], columns: list[Column], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step(columns)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def peak_gb(step: Callable[[list[Column]], Any], columns: list[Column], device: torch.device) -> float | None:
    """Return the most memory of a step beyond what is allocated before it."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(columns)
    return round((torch.cuda.max_memory_allocated() - before) / 1e9, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = torch.device("cpu" if options.tiny else "cuda")
    rows, micro, longest = (64, 8, 64) if options.tiny else (options.batch, options.micro_batch, options.longest)
    config = sized(options.tiny)
    ours = Ours(config, device, micro * longest)
    model = PlainModel(config).to(device)
    same_weights(model, ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    plain = {name: Plain(model, optimizer, micro, trim) for name, trim in (("batch", False), ("micro batch", True))}
    first = batch(config, rows, longest, 0, device)
    off = differences(ours, plain["micro batch"], first)
    kinds: dict[str, Any] = {"ours": ours, **{f"padded to the {name}": each for name, each in plain.items()}}
    peaks = {name: peak_gb(kind.step, first, device) for name, kind in kinds.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    tokens: list[int] = []
    for number in range(1, options.rounds + 1):
        columns = batch(config, rows, longest, number, device)
        tokens.append(sum(int(column["attention_mask"].sum()) for column in columns))
        for name, kind in kinds.items():
            seconds[name].append(timed(kind.step, columns, device))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    encoded = {
        name: sum(math.prod(part["input_ids"].shape) for column in each.micro_batches(first) for part in column)
        for name, each in plain.items()
    }
    real = sum(int(column["attention_mask"].sum()) for column in first)
    found = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in model.parameters()),
        "batch": rows,
        "micro_batch": micro,
        "micro_tokens": micro * longest,
        "tokens_per_step": round(statistics.mean(tokens)),
        "padding_share": {name: round(1 - real / count, 3) for name, count in encoded.items()},
        "differences": off,
        "peak_gb_of_a_step": peaks,
        "step_ms": {name: round(value * 1000, 1) for name, value in medians.items()},
        "step_ms_of_rounds": {name: [round(value * 1000, 1) for value in each] for name, each in seconds.items()},
        "times_as_fast": {name: round(medians[name] / medians["ours"], 3) for name in kinds if name != "ours"},
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
