"""Layouts at sizes that do not come out even: odd lengths, empty shards, ranks and experts without tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from holdfast.train.layout import Layout
from holdfast.train.loss import MicroBatch
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.train_cases import assemble, model, pieces, share

pytestmark = pytest.mark.sliced(9)

ODD = {"hidden_size": 20, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 37}


@dataclass(frozen=True)
class Case:
    """A model on a layout; `blank` are micro batches of which no label counts."""

    model: ModelConfig
    layout: Layout
    micro_batches: int
    rows: int
    length: int
    blank: tuple[int, ...] = ()


CASES = {
    "one key-value head, odd sizes": Case(
        model("qwen2", **ODD, intermediate_size=13), Layout(dp_shard=3), 3, 1, 5, blank=(1,)
    ),
    "fewer experts than their shards": Case(
        model("qwen3_moe", **ODD, num_experts=4, moe_intermediate_size=7), Layout(dp_shard=6, ep=2), 6, 1, 5, blank=(1,)
    ),
    "ranks and experts without a token": Case(
        model("qwen2_moe", num_experts=2, num_experts_per_tok=1, tie_word_embeddings=True),
        *(Layout(dp_shard=8, ep=2), 8, 1, 2, (1, 2, 3)),
    ),
    "replicas of experts": Case(model("qwen3_moe"), Layout(dp_replicate=2, dp_shard=4, ep=2), 8, 1, 8),
    "replicas that each have one expert": Case(model("qwen3_moe"), Layout(dp_replicate=8, ep=8), 8, 1, 3, blank=(0,)),
    "four slices of a sequence": Case(
        model("llama", num_key_value_heads=4, tie_word_embeddings=True), Layout(tp=4), 2, 3, 4, blank=(0,)
    ),
    "three stages of five layers, four micro batches": Case(
        model("llama", num_hidden_layers=5, tie_word_embeddings=True), Layout(pp=3), 4, 1, 7
    ),
    "three ranks interleave": Case(
        model("qwen2_moe", num_hidden_layers=7),
        *(Layout(pp=3, schedule="interleaved", stages_per_rank=2), 6, 1, 5, (2,)),
    ),
    "one micro batch for four stages": Case(
        model("llama", num_hidden_layers=5), Layout(pp=2, schedule="interleaved", stages_per_rank=2), 1, 2, 4
    ),
    "sharded experts in stages": Case(
        model("qwen3_moe", tie_word_embeddings=True), Layout(dp_shard=4, ep=2, pp=2), 8, 1, 8
    ),
}


def _batches(case: Case, seed: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(case.micro_batches):
        ids = torch.randint(0, case.model.vocab_size, (case.rows, case.length + 1), generator=generator)
        labels = ids[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
        if number in case.blank:
            labels.fill_(-100)
        made.append(MicroBatch(ids[:, :-1].contiguous(), labels))
    return made


def _steps(case: Case, layout: Layout) -> dict[str, Any]:
    replica = build(case.model, layout)
    optimizer = replica.make_optimizer(lr=1e-2, eps=1e-6, weight_decay=0.1)
    sums = replica.forward_backward(share(replica, _batches(case, 0)))
    gradients = pieces({key: p.grad for key, p in replica.parameters().items()})
    norm = replica.clip(0.5)
    optimizer.step()
    evaluated = replica.evaluate(share(replica, _batches(case, 1)))
    later = replica.forward_backward(share(replica, _batches(case, 2)))
    return {"gradients": gradients, "norm": norm, "sums": sums, "evaluated": evaluated, "later": later}


@pytest.mark.sliced(99)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_those_of_one_process(name: str) -> None:
    case = CASES[name]
    truth = _steps(case, Layout())
    found = run_ranks(case.layout.world, _steps, case, case.layout, deadline_s=200)
    gradients = assemble([rank["gradients"] for rank in found])
    for key, value in assemble([truth["gradients"]]).items():
        assert float((gradients[key] - value).norm()) <= 1e-5 * float(value.norm()), key
    for rank in found:
        assert rank["norm"] == pytest.approx(truth["norm"], rel=1e-5)
        for what, near in (("sums", 1e-5), ("evaluated", 1e-4), ("later", 1e-4)):
            assert (rank[what].tokens, rank[what].sequences) == (truth[what].tokens, truth[what].sequences)
            assert rank[what].total == pytest.approx(truth[what].total, rel=near)
