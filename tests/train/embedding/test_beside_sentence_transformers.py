"""Losses, gradients and random numbers are those of sentence-transformers' cached losses."""

from __future__ import annotations

import copy

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses as peer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from holdfast.train.embedding import GradCache
from holdfast.train.embedding.losses import CoSENT, FalseNegatives, InfoNCE, KLDistillation, MarginMSE, Matryoshka
from tests.train.embedding.toys import distance, encoder, gradients, texts

ROWS, MICRO = 13, 4
WITHIN = {torch.float32: 1e-6, torch.float64: 1e-12}
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def sentence_transformer(module):
    module.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    return SentenceTransformer(modules=[module], device="cpu")


def beside(make_peer, loss, columns, *, dropout=0.0, dtype=torch.float64, peer_labels=None, **extras):
    """Compare one step of both; returns our loss."""
    model = encoder(0, dropout, dtype)
    theirs = sentence_transformer(copy.deepcopy(model))
    torch.manual_seed(5)
    truth = make_peer(theirs)([{"x": column} for column in columns], peer_labels)
    truth.backward()
    random_after = torch.get_rng_state()
    torch.manual_seed(5)
    found = GradCache(model, loss, micro_batch=MICRO).step(columns, **extras)
    assert torch.equal(torch.get_rng_state(), random_after)
    assert distance(found.double(), truth.detach().double()) < WITHIN[dtype]
    assert distance(gradients(model).double(), gradients(theirs[0]).double()) < WITHIN[dtype]
    return found


def cached(**options):
    return lambda model: peer.CachedMultipleNegativesRankingLoss(model, mini_batch_size=MICRO, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("columns", [2, 3, 5])
def test_info_nce(columns, dropout, dtype):
    beside(cached(), InfoNCE(0.05), texts(ROWS, columns, dtype=dtype), dropout=dropout, dtype=dtype)


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("directions", [ALL, ALL[::2], ALL[:2], (ALL[0], ALL[3])], ids="+".join)
def test_all_directions_in_one_softmax(directions, columns):
    beside(cached(directions=directions, scale=11.0), InfoNCE(1 / 11, directions=directions), texts(ROWS, columns))


def test_the_symmetric_loss():
    both = ("query_to_doc", "doc_to_query")
    loss = InfoNCE(directions=both, joint=False)
    beside(cached(directions=both, partition_mode="per_direction"), loss, texts(ROWS, 3))


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.25]])
def test_matryoshka(weights):
    dims = [16, 8, 3]

    def make_peer(model):
        return peer.MatryoshkaLoss(model, cached()(model), dims, weights)

    beside(make_peer, Matryoshka(InfoNCE(0.05), dims, weights), texts(ROWS, 3), dropout=0.2)


@pytest.mark.parametrize("of", ["absolute", "relative"])
@pytest.mark.parametrize("margin", [0.0, 0.1])
@pytest.mark.parametrize("columns", [2, 3])
def test_gist(columns, margin, of):
    guide = encoder(7).eval()
    data = texts(ROWS, columns)
    with torch.no_grad():
        guides = [guide(column) for column in data]

    def make_peer(model):
        return peer.GISTEmbedLoss(
            model, sentence_transformer(guide), temperature=0.05, margin_strategy=of, margin=margin
        )

    loss = InfoNCE(
        0.05,
        directions=("query_to_doc", "query_to_query", "positive_to_positive"),
        false_negatives=FalseNegatives(margin, of),
    )
    found = beside(make_peer, loss, data, guides=guides)
    plain = InfoNCE(0.05, directions=loss.directions)
    assert GradCache(encoder(), plain).step(data) != found  # some candidates were left out


def test_cosent():
    labels = torch.tensor([0.0, 1, 2, 2, 1, 3, 0, 5, 4, 4, 2, 1, 0], dtype=torch.float64)
    beside(
        lambda model: peer.CoSENTLoss(model, scale=20.0),
        CoSENT(0.05),
        texts(ROWS, 2),
        peer_labels=labels,
        labels=labels,
    )


@pytest.mark.parametrize("columns", [3, 5])
def test_distillation(columns):
    scores = torch.randn(ROWS, columns - 1, dtype=torch.float64)
    data = texts(ROWS, columns)
    beside(peer.MarginMSELoss, MarginMSE(), data, peer_labels=scores, scores=scores)
    beside(
        lambda model: peer.DistillKLDivLoss(model, temperature=2.0),
        KLDistillation(2.0),
        data,
        peer_labels=scores,
        scores=scores,
    )
