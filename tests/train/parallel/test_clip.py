"""Clipping agrees with torch's own where torch's own is right: on one rank."""

from __future__ import annotations

import pytest
import torch

from holdfast.train.layout import Layout
from holdfast.train.parallel.parallel_model import build
from tests.dist.train_cases import batches, model


@pytest.mark.parametrize("max_norm", [0.25, 1e9], ids=["above", "below"])
def test_norm_and_gradients_are_those_of_torch(max_norm: float) -> None:
    config = model("qwen3_moe", tie_word_embeddings=True)
    ours, theirs = build(config, Layout()), build(config, Layout())
    for replica in (ours, theirs):
        replica.forward_backward(batches(2))
    expected = torch.nn.utils.clip_grad_norm_(theirs.module.parameters(), max_norm)
    assert ours.clip(max_norm) == pytest.approx(float(expected), rel=1e-6)
    for (key, one), other in zip(ours.parameters().items(), theirs.parameters().values(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-9, msg=key)
