"""The vectors of an embedding model do not depend on padding; it trains with GradCache; errors are named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.train.embedding import EmbeddingModel, EmbeddingSettings, GradCache, open_embedding_model
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.models.decoder import Decoder
from holdfast.train.models.dropout import sample_keys
from tests.dist.train_cases import model
from tests.train.embedding.tiny_models import (
    TEXTS,
    distance_of_gradients,
    largest_distance,
    make_tokenizer,
    write_model,
)

DROPOUT: dict[str, Any] = {"residual_dropout": 0.2, "attention_dropout": 0.2, "embedding_dropout": 0.1}


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "bert"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmbeddingModel:
    folder = write_model(tmp_path_factory.mktemp("hub") / request.param, request.param)
    return open_embedding_model(folder, EmbeddingSettings())


def padded(ours: EmbeddingModel, side: str, length: int = 16) -> dict[str, torch.Tensor]:
    assert ours.text_inputs is not None
    ours.text_inputs.tokenizer.padding_side = side
    texts = [f"find: {text}" for text in TEXTS]
    found = ours.text_inputs.tokenizer(texts, padding="max_length", max_length=length, return_tensors="pt")
    assert found["attention_mask"][0, 0] == (side == "right")
    return dict(found)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
def test_left_and_right_padding_give_the_same_vectors(opened: EmbeddingModel, pooling: str, causal: bool) -> None:
    assert opened.text_inputs is not None
    ours = EmbeddingModel(
        opened.encoder, EmbeddingSettings(pooling=pooling, causal=causal), opened.text_inputs.tokenizer
    ).eval()
    with torch.no_grad():
        right = ours(padded(ours, "right"))
        assert torch.equal(ours(padded(ours, "left")), right)
        for row, text in enumerate(TEXTS):  # and those of a text alone
            assert largest_distance(right[row : row + 1], ours(ours.tokenize([f"find: {text}"]))) < 1e-6


def test_a_bidirectional_decoder_looks_ahead(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hub", "qwen3")
    for causal in (True, False):
        ours = open_embedding_model(folder, EmbeddingSettings(pooling="cls", causal=causal))
        first, other = ours.encode(["the cat sat", "the dog sat"])
        assert torch.equal(first, other) == causal


def inputs_with_dropout(ours: EmbeddingModel, first: int, side: str = "right") -> list[dict[str, torch.Tensor]]:
    columns = [padded(ours, side) for _ in range(2)]
    columns[1]["input_ids"] = columns[1]["input_ids"].roll(1, 0)
    columns[1]["attention_mask"] = columns[1]["attention_mask"].roll(1, 0)
    for number, column in enumerate(columns):
        column["dropout_keys"] = sample_keys(1, first, number * len(TEXTS), len(TEXTS))
        column["prompt_length"] = torch.tensor([1, 2, 1, 3])
    return columns


@pytest.mark.parametrize("causal", [True, False])
def test_it_trains_with_grad_cache(tmp_path: Path, causal: bool) -> None:
    folder = write_model(tmp_path / "hub", "qwen3")
    settings = EmbeddingSettings(pooling="mean", causal=causal, include_prompt=False)
    ours = open_embedding_model(folder, settings, recompute=True, **DROPOUT).double().train()
    ours.encoder.compute_dtype = torch.float64  # type: ignore[assignment]
    columns = inputs_with_dropout(ours, 3)
    loss = InfoNCE(0.05)
    truth = copy.deepcopy(ours)
    vectors = [truth(column) for column in columns]
    scores = vectors[0] @ vectors[1].T / 0.05
    expected = torch.nn.functional.cross_entropy(scores, torch.arange(len(TEXTS)))
    expected.backward()
    whole: Any = {"trim": False}  # the angles of positions, in fp32, differ in the last bit with the length
    found = GradCache(ours, loss, micro_batch=3, **whole).step(columns)
    assert float(found) == pytest.approx(float(expected.detach()), rel=1e-12)
    assert distance_of_gradients(ours, truth) < 1e-12
    on_left = copy.deepcopy(ours)
    on_left.zero_grad()
    GradCache(on_left, loss, micro_batch=2, **whole).step(inputs_with_dropout(ours, 3, "left"))
    assert distance_of_gradients(on_left, truth) < 1e-12
    on_left.zero_grad()
    GradCache(on_left, loss, micro_batch=2, **whole).step(inputs_with_dropout(ours, 4))
    assert distance_of_gradients(on_left, truth) > 1e-3  # the dropout of another step


def test_bert_trains_with_the_dropout_of_torch(tmp_path: Path) -> None:
    ours = (
        open_embedding_model(write_model(tmp_path / "hub", "bert"), EmbeddingSettings(pooling="mean")).double().train()
    )
    columns = [padded(ours, "right"), padded(ours, "left")]
    truth = copy.deepcopy(ours)
    torch.manual_seed(3)
    vectors = [truth(column) for column in columns]
    torch.nn.functional.cross_entropy(vectors[0] @ vectors[1].T / 0.05, torch.arange(len(TEXTS))).backward()
    torch.manual_seed(3)
    GradCache(ours, InfoNCE(0.05), micro_batch=len(TEXTS), trim=False).step(columns)
    assert distance_of_gradients(ours, truth) < 1e-12


def test_encode_keeps_the_mode_and_the_order(tmp_path: Path) -> None:
    ours = open_embedding_model(write_model(tmp_path / "hub", "qwen3"), EmbeddingSettings(), **DROPOUT).train()
    together = ours.encode(TEXTS)
    assert ours.training and together.shape == (len(TEXTS), ours.width)
    assert largest_distance(ours.encode(TEXTS, batch_size=1), together) < 1e-6
    assert largest_distance(ours.encode(TEXTS[::-1]).flip(0), together) < 1e-6
    assert ours.encode([]).shape == (0, ours.width)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_of_padding_only_gives_numbers(causal: bool) -> None:
    ours = EmbeddingModel(Decoder(model("qwen3"), head=False), EmbeddingSettings(causal=causal, pooling="mean"))
    mask = torch.tensor([[1, 1], [0, 0]])
    assert bool(ours({"input_ids": torch.ones(2, 2, dtype=torch.int64), "attention_mask": mask}).isfinite().all())


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    settings = EmbeddingSettings()
    refused: list[tuple[type[Exception], str, Any]] = [
        (holdfast.InvalidArgument, "head=False", lambda: EmbeddingModel(Decoder(model("qwen3")), settings)),
        (
            holdfast.Unsupported,
            "'qwen3_moe': decoders with experts",
            lambda: EmbeddingModel(Decoder(model("qwen3_moe"), head=False), settings),
        ),
        (
            holdfast.InvalidArgument,
            "dims=64 is more than the 32",
            lambda: EmbeddingModel(Decoder(model("qwen3"), head=False), EmbeddingSettings(dims=(64,))),
        ),
    ]
    bare = EmbeddingModel(Decoder(model("qwen3", residual_dropout=0.1), head=False), settings)
    inputs = {"input_ids": torch.ones(1, 2, dtype=torch.int64), "attention_mask": torch.ones(1, 2)}
    refused += [
        (holdfast.InvalidArgument, "no 'dropout_keys'", lambda: bare.train()(inputs)),
        (holdfast.InvalidArgument, "are a list; expected what tokenize returns", lambda: bare(TEXTS)),
        (holdfast.InvalidArgument, "no 'attention_mask'", lambda: bare({"input_ids": inputs["input_ids"]})),
        (holdfast.InvalidArgument, "no tokenizer", lambda: bare.encode(["a"])),
        (holdfast.InvalidArgument, "needs a tokenizer", bare.files),
    ]
    for error, message, call in refused:
        with pytest.raises(error, match=message):
            call()
    assert bool(bare.eval()(inputs).isfinite().all())


def test_a_text_without_tokens_is_refused() -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.backend_tokenizer.post_processor = None  # as Qwen2's, which adds no token
    ours = EmbeddingModel(Decoder(model("qwen3"), head=False), EmbeddingSettings(), tokenizer)
    with pytest.raises(holdfast.InvalidArgument, match="text 1, ' ', has no tokens"):
        ours.tokenize(["cat", " "])
    tokenizer.pad_token = None
    with pytest.raises(holdfast.InvalidArgument, match="no padding token"):
        EmbeddingModel(ours.encoder, EmbeddingSettings(), tokenizer)
