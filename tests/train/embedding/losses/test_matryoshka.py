"""Matryoshka's dims and weights are checked."""

from __future__ import annotations

import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.losses import InfoNCE, Matryoshka
from tests.train.embedding.toys import texts


@pytest.mark.parametrize(("dims", "weights"), [([], None), ([4, 0], None), ([4, 2], [1.0]), ([True], None)])
def test_dims_and_weights_that_mean_nothing_are_refused(dims, weights):
    with pytest.raises(InvalidArgument):
        Matryoshka(InfoNCE(), dims, weights)


def test_dims_larger_than_the_vector_are_refused():
    with pytest.raises(InvalidArgument, match="dims has 64, and the embeddings have 12 numbers"):
        Matryoshka(InfoNCE(), [64, 4])(gather_columns(texts(3, 2), None))
