"""Losses are sums over tokens that count, whatever the micro batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from holdfast.core.errors import InvalidArgument
from holdfast.train.layout import Layout
from holdfast.train.loss import LossSums, MicroBatch, token_loss_sum
from holdfast.train.parallel.parallel_model import build
from tests.dist.train_cases import VOCAB, batches, model


def test_the_loss_is_the_mean_over_tokens_not_over_micro_batches() -> None:
    replica = build(model("llama"), Layout())
    few, many = batches(2)
    few.labels[:, 1:] = -100
    found = replica.forward_backward([few, many])
    logits = torch.cat([replica.module(batch.input_ids) for batch in (few, many)])
    labels = torch.cat((few.labels, many.labels))
    expected = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert found.tokens == int((labels != -100).sum())
    assert found.loss == pytest.approx(float(expected.detach()), rel=1e-6)


def test_gradients_do_not_depend_on_how_a_batch_is_divided() -> None:
    whole = build(model("qwen3_moe"), Layout())
    parts = build(model("qwen3_moe"), Layout())
    batch = batches(1)[0]
    one = whole.forward_backward([batch])
    halves = [MicroBatch(batch.input_ids[n : n + 1], batch.labels[n : n + 1]) for n in (0, 1)]
    two = parts.forward_backward(halves)
    assert one.total == pytest.approx(two.total, rel=1e-6)
    others = parts.parameters()
    for key, parameter in whole.parameters().items():
        expected = others[key].grad
        assert float((parameter.grad - expected).norm() / expected.norm()) < 1e-5, key


def test_a_second_batch_does_not_add_to_the_first() -> None:
    replica = build(model("llama"), Layout())
    replica.forward_backward(batches(2))
    first = replica.gradient_norm()
    replica.forward_backward(batches(2))
    assert replica.gradient_norm() == first


def test_a_batch_where_nothing_counts_has_a_loss_of_zero() -> None:
    replica = build(model("llama"), Layout())
    batch = batches(1)[0]
    batch.labels.fill_(-100)
    assert replica.forward_backward([batch]) == LossSums(0.0, 0, 0.0, 0, 0.001)
    assert replica.clip(1.0) == 0.0


def test_half_precision_logits_are_summed_in_full() -> None:
    logits = torch.randn(1, 4, VOCAB).bfloat16()
    labels = torch.tensor([[1, 2, 3, -100]])
    found = token_loss_sum(logits, labels, None)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(functional.cross_entropy(logits[0, :3].float(), labels[0, :3])) * 3)


def test_sums_of_batches_add_up() -> None:
    sums = LossSums(6.0, 3, 1.0, 2, 0.1) + LossSums(2.0, 1, 3.0, 2, 0.1)
    assert (sums.loss, sums.aux_loss, sums.total) == (2.0, 1.0, 2.1)


def test_no_micro_batches_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="no micro batches"):
        build(model("llama"), Layout()).forward_backward([])
