"""Any division into micro batches gives the gradients of the whole batch at once; what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding import GradCache
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.losses import FalseNegatives, InfoNCE
from tests.train.embedding.toys import distance, encoder, gradient_of, gradients, texts


def at_once(columns, scale=1.0):
    model = encoder()
    loss = InfoNCE()(gather_columns([model(column) for column in columns], None))
    (loss * scale).backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("micro_batch", [1, 3, 7, 100])
def test_any_micro_batch_gives_the_whole_gradients(micro_batch):
    columns = texts(7, 3)
    model = encoder()
    loss = GradCache(model, InfoNCE(), micro_batch=micro_batch).step(columns, scale=8.0)
    truth, whole = at_once(columns, 8.0)
    assert distance(loss, truth) < 1e-12
    assert distance(gradients(model), whole) < 1e-12


class Masked(nn.Module):
    """The mean of the embeddings of a text's tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8, dtype=torch.float64)
        self.lengths: list[int] = []

    def forward(self, inputs):
        mask = inputs["attention_mask"]
        self.lengths.append(mask.shape[1])
        return (self.embed(inputs["input_ids"]) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def test_micro_batches_by_tokens_and_without_padding():
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 9, 1, 4, 4, 2])
    mask = (torch.arange(9) < lengths[:, None]).long()
    columns = [{"input_ids": torch.randint(50, (6, 9), generator=draw), "attention_mask": mask} for _ in range(2)]
    found = []
    for micro_tokens, trim in ((None, False), (8, False), (8, True)):
        torch.manual_seed(0)
        model = Masked()
        GradCache(model, InfoNCE(), micro_tokens=micro_tokens, trim=trim).step(columns)
        found.append((gradient_of(model.embed.weight), sum(model.lengths)))
    (whole, _), (by_tokens, padded), (cut, short) = found
    assert distance(by_tokens, whole) < 1e-12 and distance(cut, whole) < 1e-12
    assert short < padded


def test_an_encoder_that_is_a_function_and_lists_of_inputs():
    model = encoder()
    columns = texts(5, 2)
    cache = GradCache(lambda rows: model(torch.stack(rows)), InfoNCE(), micro_batch=2, module=model)
    loss = cache.step([list(column) for column in columns])
    assert distance(loss, at_once(columns)[0]) < 1e-12
    assert distance(gradients(model), at_once(columns)[1]) < 1e-12
    assert torch.equal(cache.evaluate([list(column) for column in columns]), loss)


def test_half_precision_embeddings_are_compared_in_fp32():
    model = encoder(dtype=torch.bfloat16)
    loss = GradCache(model, InfoNCE(), micro_batch=2).step(texts(5, 2, dtype=torch.bfloat16))
    assert loss.dtype == torch.float32 and model.net[0].weight.grad.dtype == torch.bfloat16


def test_autocast_around_a_step_rounds_the_model_and_not_the_loss():
    columns = texts(9, 2, dtype=torch.float32)
    dtypes, found = [], []

    def watched(gathered):
        dtypes.append((gathered.own[0] @ gathered.own[1].T).dtype)
        return InfoNCE()(gathered)

    for micro_batch, enabled in ((9, True), (2, True), (2, False)):
        model = encoder(dtype=torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = GradCache(model, watched, micro_batch=micro_batch).step(columns)
        found.append((loss, gradients(model)))
    (whole, truth), (parts, gradient), (plain, exact) = found
    assert dtypes == [torch.float32] * 3
    assert distance(parts, whole) < 1e-6 and distance(gradient, truth) < 1e-2
    assert 1e-5 < distance(gradient, exact) < 0.1 and distance(parts, plain) < 0.1


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([torch.zeros(0, 12), torch.zeros(0, 12)], "column 0 has no rows"),
        ([], "needs columns"),
        ([torch.zeros(3, 12), torch.zeros(2, 12)], "have 2, 3 rows"),
        ([torch.zeros(3, 4, 12), torch.zeros(3, 4, 12)], r"encode returned \[2, 4, 16\] for 2 rows"),
    ],
)
def test_batches_that_do_not_fit_are_refused(columns, words):
    model = encoder(dtype=torch.float32)
    with pytest.raises(InvalidArgument, match=words):
        GradCache(model, InfoNCE(), micro_batch=2).step(columns)
    assert all(parameter.grad is None for parameter in model.parameters())


def pairs(loss, given=None, **extras):
    model = encoder(dtype=torch.float32)
    cache = GradCache(model, loss, micro_batch=2)
    try:
        return cache.step(texts(3, 2, dtype=torch.float32) if given is None else given, **extras)
    finally:
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda columns: (columns.own[0] * columns.own[1]).sum(1), r"returned a tensor \[3\]; expected .* one number"),
        (lambda columns: {"loss": columns.own[0].sum()}, "returned a dict; expected a tensor with one number"),
        (lambda columns: columns.own[0].detach().sum(), "returned a tensor without gradients"),
    ],
    ids=["rows", "dict", "detached"],
)
def test_what_is_no_loss_is_named(loss, words):
    with pytest.raises(InvalidArgument, match=words):
        pairs(loss)


@pytest.mark.parametrize(
    ("extras", "words"),
    [
        ({"texts": torch.zeros(2, 2)}, r"texts are \[2, 2\]; expected a number for each of \(3, 2\)"),
        ({"texts": torch.zeros(3)}, r"texts are \[3\]"),
        ({"guides": [torch.zeros(3, 4)]}, "guides for 1 columns, and 2 columns"),
        ({"guides": [torch.zeros(3, 4), torch.zeros(2, 4)]}, r"guides of column 1 are \[2, 4\]; expected 3 rows"),
    ],
)
def test_texts_and_guides_of_other_rows_are_refused(extras, words):
    with pytest.raises(InvalidArgument, match=words):
        pairs(InfoNCE(false_negatives=FalseNegatives()), **extras)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"input_ids": torch.zeros(2, 3), "attention_mask": torch.ones(2, 3)}, "one input with input_ids, attention"),
        ([{"input_ids": [[1]]}, {"input_ids": [[1]]}], "no tensor with rows: tokenize with return_tensors='pt'"),
    ],
)
def test_what_are_no_columns_is_named(given, words):
    with pytest.raises(InvalidArgument, match=words):
        pairs(InfoNCE(), given)


def test_an_encoder_that_returns_a_dict_or_is_frozen_is_named():
    model = encoder(dtype=torch.float32)
    columns = texts(3, 2, dtype=torch.float32)
    as_dict = GradCache(lambda rows: model({"x": rows}), InfoNCE(), module=model)
    with pytest.raises(InvalidArgument, match=r"returned a dict; .* returns one of 'x', 'sentence_embedding'"):
        as_dict.step(columns)
    with torch.inference_mode(), pytest.raises(InvalidArgument, match=r"within torch\.inference_mode"):
        GradCache(model, InfoNCE()).step(columns)
    with pytest.raises(InvalidArgument, match="all parameters are frozen"):
        GradCache(model.requires_grad_(False), InfoNCE()).step(columns)


def test_a_frozen_encoder_of_documents_beside_one_of_queries():
    queries, documents = encoder(0), encoder(1).requires_grad_(False)
    columns = texts(5, 2)

    def encode(rows):
        return (queries if rows["side"][0] == 0 else documents)(rows["x"])

    sides = [{"x": column, "side": torch.full((5,), side)} for side, column in enumerate(columns)]
    loss = GradCache(encode, InfoNCE(), micro_batch=2, module=queries).step(iter(sides))
    found = gradients(queries)
    queries.zero_grad()
    whole = InfoNCE()(gather_columns([queries(columns[0]), documents(columns[1])], None))
    whole.backward()
    assert distance(loss, whole.detach()) < 1e-12 and distance(found, gradients(queries)) < 1e-12


def test_the_scale_of_a_grad_scaler():
    columns = texts(7, 2, dtype=torch.float32)
    model = encoder(dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    GradCache(model, InfoNCE(), micro_batch=2).step(columns, scale=scaler.scale(torch.ones(())))
    assert gradients(model).norm() > 100
    scaler.unscale_(optimizer)
    plain = encoder(dtype=torch.float32)
    GradCache(plain, InfoNCE(), micro_batch=2).step(columns)
    assert distance(gradients(model), gradients(plain)) < 1e-6
    scaler.step(optimizer)
    scaler.update()
    for trained, before in zip(model.parameters(), plain.parameters(), strict=True):
        assert distance(trained.detach(), before.detach() - 0.1 * gradient_of(before)) < 1e-6


@pytest.mark.parametrize("options", [{"micro_batch": 0}, {"micro_tokens": -1}, {"micro_batch": True}])
def test_micro_batches_of_nothing_are_refused(options):
    with pytest.raises(InvalidArgument, match="at least 1"):
        GradCache(encoder(), InfoNCE(), **options)
