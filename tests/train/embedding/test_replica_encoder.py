"""The trainer's model as an encoder on one process: its gradients, what is padded, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding import GradCache, ReplicaEncoder
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.layout import Layout
from holdfast.train.models.dropout import sample_keys
from holdfast.train.parallel.parallel_model import build
from tests.dist.train_cases import model
from tests.train.embedding.toys import distance, gradients

LENGTHS = torch.tensor([3, 6, 1, 5, 2])


def last(hidden, inputs):
    return hidden[torch.arange(len(hidden)), inputs["attention_mask"].sum(1) - 1]


def replica(**changes):
    return build(model("qwen3", num_hidden_layers=2, **changes), Layout(), dtype=torch.float64, head=False)


def columns(dropout=True):
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(8) < LENGTHS[:, None]).long()
    found = [{"input_ids": torch.randint(64, (5, 8), generator=draw), "attention_mask": mask} for _ in range(2)]
    keys = [sample_keys(1, 2, first, 5) for first in (0, 5)]
    return [column | {"dropout_keys": key} for column, key in zip(found, keys, strict=True)] if dropout else found


@pytest.mark.parametrize(
    "options", [{"micro_batch": 2}, {"micro_batch": 2, "trim": False, "sort": False}, {"micro_tokens": 7}], ids=str
)
@pytest.mark.parametrize("causal", [True, False])
def test_any_micro_batch_drops_and_learns_as_the_whole_batch(options, causal):
    made = replica(residual_dropout=0.2, attention_dropout=0.1)
    loss = GradCache(ReplicaEncoder(made, last, causal=causal), InfoNCE(), **options).step(columns())
    whole = replica(residual_dropout=0.2, attention_dropout=0.1)
    found = []
    for column in columns():
        visible = None if causal else column["attention_mask"].bool()
        hidden = whole.module(column["input_ids"], keys=column["dropout_keys"], visible=visible)
        found.append(last(hidden, column))
    truth = InfoNCE()(gather_columns(found, None))
    truth.backward()
    assert distance(loss, truth.detach()) < 1e-6
    assert distance(gradients(made.module), gradients(whole.module)) < 1e-6


def test_gradients_of_before_stay_after_an_error():
    made = replica()
    cache = GradCache(ReplicaEncoder(made, last), InfoNCE())
    cache.step(columns(False))
    before = gradients(made.module).clone()
    with pytest.raises(RuntimeError, match="no such loss"):
        GradCache(ReplicaEncoder(made, last), lambda columns: (_ for _ in ()).throw(RuntimeError("no such loss"))).step(
            columns(False)
        )
    assert torch.equal(gradients(made.module), before)


def test_stages_get_padded_rows_and_tokens_that_the_pooling_does_not_see():
    made = replica()
    made.meshes = SimpleNamespace(layout=Layout(tp=2), data_group=lambda: None)
    encoder = ReplicaEncoder(made, lambda hidden, inputs: hidden, causal=False)
    column = {name: values[:3, :5] for name, values in columns()[0].items() if values.dim() == 2}
    column["dropout_keys"] = torch.arange(3)
    ids, options = encoder.stage_inputs(column, 4, 7)
    assert ids.shape == (4, 8) and torch.equal(ids[3], ids[0]) and not ids[:, 5:].any()
    assert options["keys"].tolist() == [0, 1, 2, 0]
    assert (
        torch.equal(options["visible"][:3, :5], column["attention_mask"].bool()) and not options["visible"][:, 5:].any()
    )
    assert encoder.embed(torch.zeros(4, 8, 2), column).shape == (3, 5, 2)


def left_padded():
    return [{**column, "attention_mask": column["attention_mask"].flip(1)} for column in columns()]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (columns(False), "have no 'dropout_keys'"),
        ([columns()[0], columns(False)[1]], "some columns have 'dropout_keys'"),
        (left_padded(), "column 0 has padding before a token"),
        ([{**columns()[0], "attention_mask": torch.zeros(5, 8)}], "a row without tokens"),
        ([torch.zeros(5, 8)], r"of column 0 are torch.float32 \[5, 8\]"),
        ([["a text", "another"]], "needs token ids"),
    ],
)
def test_columns_that_it_cannot_encode_are_refused(batch, words):
    made = replica(residual_dropout=0.2)
    with pytest.raises(InvalidArgument, match=words):
        GradCache(ReplicaEncoder(made, last), InfoNCE()).step(batch)
    assert all(parameter.grad is None for parameter in made.module.parameters())


def test_evaluation_needs_no_dropout_keys():
    with_dropout, without = replica(residual_dropout=0.2), replica()
    found = [
        GradCache(ReplicaEncoder(made, last), InfoNCE()).evaluate(columns(False)) for made in (with_dropout, without)
    ]
    assert torch.equal(*found)


def test_models_and_options_that_do_not_fit_are_refused():
    made = replica()
    with pytest.raises(InvalidArgument, match="build it with head=False"):
        ReplicaEncoder(build(model("qwen3"), Layout()), last)
    with pytest.raises(InvalidArgument, match="its own group and module"):
        GradCache(ReplicaEncoder(made, last), InfoNCE(), module=made.module)
    made._pipeline = object()
    with pytest.raises(InvalidArgument, match="use micro_batch"):
        GradCache(ReplicaEncoder(made, last), InfoNCE(), micro_tokens=100)
