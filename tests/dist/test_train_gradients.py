"""Every layout trains the same model: initial values, losses, gradients and norms are those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from holdfast.train.layout import Layout
from tests.dist.harness import run_ranks
from tests.dist.train_cases import DENSE, LAYOUTS, assemble, model, one_step

pytestmark = pytest.mark.sliced(24)

MICRO_BATCHES = 4  # of the global batch: what a rank has more than one of, it accumulates
DEADLINE_S = 200.0
SPARSE_MODELS = {"qwen3_moe": model("qwen3_moe"), "qwen2_moe-tied": model("qwen2_moe", tie_word_embeddings=True)}
DENSE_MODELS = {"qwen2": model("qwen2"), "llama-tied": model("llama", tie_word_embeddings=True)}
MODELS = SPARSE_MODELS | DENSE_MODELS


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """The truth: one process, all micro batches one after the other."""
    return one_step(MODELS[name], Layout(), MICRO_BATCHES)


def _steps(layout: Layout, names: list[str]) -> dict[str, Any]:
    return {name: one_step(MODELS[name], layout, MICRO_BATCHES) for name in names}


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_the_gradients_of_one_process(layout: str) -> None:
    names = [*SPARSE_MODELS, *(DENSE_MODELS if layout in DENSE else [])]
    found = run_ranks(LAYOUTS[layout].world, _steps, LAYOUTS[layout], names, deadline_s=DEADLINE_S)
    for name in names:
        compare(name, [rank[name] for rank in found])


def compare(name: str, found: list[dict[str, Any]]) -> None:
    truth = alone(name)
    initial, gradients = (assemble([rank[what] for rank in found]) for what in ("initial", "gradients"))
    for key, value in assemble([truth["initial"]]).items():
        assert torch.equal(initial[key], value), f"{name}: {key}"
    for key, value in assemble([truth["gradients"]]).items():
        assert float((gradients[key] - value).norm() / value.norm()) < 1e-5, f"{name}: {key}"
    for rank in found:
        for what in ("sums", "evaluated", "again"):
            assert rank[what].tokens == truth[what].tokens and rank[what].sequences == truth[what].sequences
            assert relative(rank[what].total, truth[what].total) < 1e-5
        assert relative(rank["norm"], truth["norm"]) < 1e-5
        assert relative(rank["clipped"], 0.5) < 1e-5
    assert len({rank["norm"] for rank in found}) == 1, "every rank clips alike"
