"""A teacher's scores that are not numbers, or of another shape, are refused; margins may be given as such."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.losses import CoSENT, KLDistillation, MarginMSE
from tests.train.embedding.toys import texts


def columns(count):
    return gather_columns(texts(4, count), None)


def test_margins_may_be_given_as_such():
    scores = torch.randn(4, 3, dtype=torch.float64)
    margins = scores[:, :1] - scores[:, 1:]
    assert torch.equal(MarginMSE()(columns(4), scores=scores), MarginMSE()(columns(4), scores=margins))


@pytest.mark.parametrize(
    ("loss", "count", "extras", "words"),
    [
        (MarginMSE(), 3, {"scores": torch.zeros(4, 5)}, r"shape \[4, 5\]; expected \[4, 2\], or \[4, 1\]"),
        (KLDistillation(), 3, {"scores": torch.zeros(4, 1)}, r"expected \[4, 2\]"),
        (MarginMSE(), 2, {"scores": torch.zeros(4, 1)}, "needs 2 documents"),
        (KLDistillation(), 3, {"scores": torch.tensor([[0.0, 0], [0, 0], [0, float("nan")], [0, 0]])}, "row 2"),
        (CoSENT(), 2, {"labels": torch.tensor([0.0, float("inf"), 1, 2])}, "labels has NaN or infinity in row 1"),
        (CoSENT(), 3, {"labels": torch.zeros(4)}, "got 3 columns"),
    ],
)
def test_what_does_not_fit_is_refused(loss, count, extras, words):
    with pytest.raises(InvalidArgument, match=words):
        loss(columns(count), **extras)


@pytest.mark.parametrize("make", [lambda: KLDistillation(0.0), lambda: CoSENT(-1.0)])
def test_options_that_mean_nothing_are_refused(make):
    with pytest.raises(InvalidArgument):
        make()
