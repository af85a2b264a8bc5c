"""Models and layouts of the trainer's tests, and what one rank has of gradients, made whole again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from holdfast.adapters.tensors import holder_of, part_view
from holdfast.layout.box import Box
from holdfast.train.layout import Layout
from holdfast.train.loss import MicroBatch
from holdfast.train.models.dropout import sample_keys
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.parallel_model import build

VOCAB, LENGTH = 64, 8


def model(family: str, **changes: Any) -> ModelConfig:
    """A tiny model; its initial values are large enough for gradients that are not noise."""
    sizes: dict[str, Any] = {
        "family": family,
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
    }
    if family.endswith("moe"):
        sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.1}
    if family == "qwen2_moe":
        sizes |= {"shared_expert_intermediate_size": 24, "norm_topk_prob": False}
    return ModelConfig(**(sizes | changes))


DENSE = {
    "fsdp-4": Layout(dp_shard=4),
    "replicate-2": Layout(dp_replicate=2),
    "hsdp-2x2": Layout(dp_replicate=2, dp_shard=2),
    "tp-2": Layout(tp=2),
    "tp-2-dp-2": Layout(tp=2, dp_shard=2),
    "pp-2-dp-2": Layout(pp=2, dp_shard=2),
    "pp-2-replicate-2": Layout(pp=2, dp_replicate=2),
    "pp-2-tp-2": Layout(pp=2, tp=2),
    "pp-2-interleaved": Layout(pp=2, schedule="interleaved", stages_per_rank=2),
    "pp-2-interleaved-dp-2": Layout(pp=2, dp_shard=2, schedule="interleaved", stages_per_rank=2),
    "pp-4": Layout(pp=4),
    "zero1-2": Layout(dp_replicate=2, zero1=True),
    "tp-2-pp-2-dp-2": Layout(tp=2, pp=2, dp_shard=2),
    "zero1-2-pp-2": Layout(dp_replicate=2, pp=2, zero1=True),
    "hsdp-2x2-tp-2": Layout(dp_replicate=2, dp_shard=2, tp=2),
}
SPARSE = {
    "ep-4": Layout(dp_shard=4, ep=4),
    "ep-2-dp-4": Layout(dp_shard=4, ep=2),
    "ep-2-replicate-4": Layout(dp_replicate=4, ep=2),
    "ep-2-hsdp-2x2": Layout(dp_replicate=2, dp_shard=2, ep=2),
    "ep-4-hsdp-2x2": Layout(dp_replicate=2, dp_shard=2, ep=4),
    "ep-2-pp-2": Layout(pp=2, dp_shard=2, ep=2),
    "ep-2-tp-2": Layout(tp=2, dp_shard=2, ep=2),
    "ep-2-tp-2-pp-2": Layout(tp=2, pp=2, dp_shard=2, ep=2),
}
LAYOUTS = DENSE | SPARSE


def batches(count: int, seed: int = 0) -> list[MicroBatch]:
    """So many micro batches of two sequences, some of whose labels do not count."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        made.append(MicroBatch(ids[:, :-1].contiguous(), labels))
    return made


def keyed(whole: list[MicroBatch]) -> list[MicroBatch]:
    """A global batch that dropout can be drawn for, as the samples from 1000 on of a run."""
    keys = sample_keys(3, 17, 1000, 2 * len(whole)).split(2)
    return [replace(batch, keys=part) for batch, part in zip(whole, keys, strict=True)]


def share(replica: Any, whole: list[MicroBatch]) -> list[MicroBatch]:
    """What one data-parallel rank gets of a global batch."""
    each = len(whole) // replica.layout.dp
    first = replica.meshes.dp_rank * each
    return whole[first : first + each]


def pieces(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, list[tuple[Box, Any]]]:
    """What this rank holds of tensors, by key and box."""
    out = {}
    for key, tensor in tensors.items():
        assert tensor is not None, key
        holder = holder_of(tensor, key)
        out[key] = [(part.box, part_view(holder, part).numpy().copy()) for part in holder.parts]
    return out


def assemble(answers: list[dict[str, list[tuple[Box, Any]]]]) -> dict[str, torch.Tensor]:
    """Whole tensors from the pieces of all ranks; replicas must agree to the last bits."""
    whole: dict[str, torch.Tensor] = {}
    for key in {key for answer in answers for key in answer}:
        held = [piece for answer in answers for piece in answer.get(key, [])]
        shape = [max(stop) for stop in zip(*(box.stops for box, _ in held))]
        full = torch.full(shape, float("nan"))
        for box, array in held:
            values = torch.from_numpy(array)
            spot = full[box.within(Box.full(tuple(shape)))]
            assert spot.isnan().all() or torch.allclose(spot, values, rtol=1e-6, atol=0), key
            spot.copy_(values)
        assert not full.isnan().any(), key
        whole[key] = full
    return whole


def one_step(config: ModelConfig, layout: Layout, micro: int, **options: Any) -> dict[str, Any]:
    """On a rank: build, one batch, everything that other layouts must agree on."""
    replica = build(config, layout, **options)
    initial = pieces(dict(replica.module.named_parameters()))
    sums = replica.forward_backward(share(replica, batches(micro)))
    gradients = pieces({key: p.grad for key, p in replica.parameters().items()})
    evaluated = replica.evaluate(share(replica, batches(micro, seed=1)))
    again = replica.forward_backward(share(replica, batches(micro)))
    norm = replica.clip(0.5)
    return {
        "initial": initial,
        "gradients": gradients,
        "sums": sums,
        "again": again,
        "evaluated": evaluated,
        "norm": norm,
        "clipped": replica.gradient_norm(),
    }
