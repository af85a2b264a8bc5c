"""InfoNCE: tiles change nothing, equal texts are no negatives, a temperature learns, and nonsense is refused."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.losses import FalseNegatives, InfoNCE
from tests.train.embedding.toys import distance, gradient_of, texts

ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc", "positive_to_positive")


def with_gradients(loss, rows=9, columns=3, **extras):
    own = [column.requires_grad_() for column in texts(rows, columns)]
    value = loss(gather_columns(own, None), **extras)
    value.backward()
    return value.detach(), torch.cat([gradient_of(column) for column in own])


@pytest.mark.parametrize("tile", [(1, 1), (2, 5), (9, 4)])
def test_tiles_change_nothing(tile):
    false_negatives = FalseNegatives(0.1)
    whole = with_gradients(InfoNCE(directions=ALL, false_negatives=false_negatives))
    rows, columns = tile
    tiled = InfoNCE(directions=ALL, false_negatives=false_negatives, tile_rows=rows, tile_columns=columns)
    for found, truth in zip(with_gradients(tiled), whole, strict=True):
        assert distance(found, truth) < 1e-12


def test_a_candidate_with_the_text_of_the_positive_does_not_count():
    """Row 0 and row 1 share a positive: for each, the other's is left out, as if the batch had no such candidate."""
    texts_of = torch.tensor([[0, 1], [2, 1], [3, 4]])
    own = texts(3, 2)
    own[1][1] = own[1][0]
    found = InfoNCE(0.5)(gather_columns(own, None), texts=texts_of)
    queries, positives = (torch.nn.functional.normalize(column, dim=1) for column in own)
    scores = queries @ positives.T / 0.5
    scores[0, 1] = scores[1, 0] = -torch.inf
    assert distance(found, torch.nn.functional.cross_entropy(scores, torch.arange(3))) < 1e-12


def test_one_pair_alone_is_refused_and_one_with_a_negative_is_not():
    with pytest.raises(InvalidArgument, match="no negatives"):
        with_gradients(InfoNCE(), rows=1, columns=2)
    value, gradient = with_gradients(InfoNCE(), rows=1, columns=3)
    assert value > 0 and gradient.norm() > 0


def test_the_temperature_learns():
    loss = InfoNCE(0.2, learned=True)
    assert loss.temperature == pytest.approx(0.2)
    with_gradients(loss)
    (scale,) = loss.parameters()
    assert float(gradient_of(scale)) not in (0.0, float("inf"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "above 0"),
        ({"temperature": float("nan")}, "above 0"),
        ({"similarity": "euclid"}, "choose 'cosine' or 'dot'"),
        ({"directions": ("query_to_dog",)}, "no direction 'query_to_dog'"),
        ({"directions": ("doc_to_query",)}, "query_to_doc among them"),
        ({"directions": ("query_to_doc", "doc_to_doc"), "joint": False}, "joint=True"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, words):
    with pytest.raises(InvalidArgument, match=words):
        InfoNCE(**options)


def test_a_single_column_is_refused():
    with pytest.raises(InvalidArgument, match="got 1 columns"):
        InfoNCE()(gather_columns(texts(3, 1), None))
