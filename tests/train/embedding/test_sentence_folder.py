"""sentence-transformers opens what is saved here, and what it saves is opened here: with the same vectors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

import holdfast
from holdfast.train.embedding import EmbeddingModel, EmbeddingSettings, open_embedding_model, read_sentence_folder
from holdfast.train.embedding.embedding_settings import POOLINGS
from tests.train.embedding.tiny_models import TEXTS, WIDTH, largest_distance, write_model

NEAR = 1e-6
PROMPTS = {"query": "find: the ", "document": "passage: "}


def save(path: Path, model: EmbeddingModel) -> Path:
    holdfast.save(path, model.state(), files=model.files())
    return path


def theirs(folder: Path, pooling: Any = "mean", **options: Any) -> Any:
    modules: list[Any] = [Transformer(str(folder)), Pooling(WIDTH, pooling, include_prompt=False), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu", **options)


def assert_same_vectors(ours: EmbeddingModel, peer: Any) -> None:
    assert largest_distance(ours.encode(TEXTS), peer.encode(TEXTS)) < NEAR
    assert largest_distance(ours.encode(TEXTS[1:2]), peer.encode(TEXTS[1:2])) < NEAR  # without padding
    assert largest_distance(ours.encode(TEXTS, "query"), peer.encode_query(TEXTS)) < NEAR
    assert largest_distance(ours.encode(TEXTS, "document"), peer.encode_document(TEXTS)) < NEAR


CASES = [(*model, pooling) for model in (("qwen2", True), ("qwen3", True), ("bert", True)) for pooling in POOLINGS]
CASES += [("qwen3", False, pooling) for pooling in POOLINGS]
SLICE = {
    ("qwen2", True, "lasttoken"),
    ("qwen3", False, "cls"),
    *(case for case in CASES if case[:2] == ("qwen3", True)),
}


@pytest.mark.parametrize(
    ("family", "causal", "pooling"),
    [pytest.param(*case, marks=[] if case in SLICE or case[0] == "bert" else pytest.mark.full) for case in CASES],
)
def test_sentence_transformers_opens_a_saved_step(tmp_path: Path, family: str, causal: bool, pooling: str) -> None:
    folder = write_model(tmp_path / "hub", family, "left")
    settings = EmbeddingSettings(pooling=pooling, causal=causal, prompts=PROMPTS, normalize=pooling != "cls")
    ours = open_embedding_model(folder, settings)
    peer = SentenceTransformer(str(save(tmp_path / "step-7", ours)), device="cpu")
    assert peer.tokenizer.padding_side == ("right" if family == "bert" else "left")
    assert_same_vectors(ours, peer)
    if family != "bert":
        peer.tokenizer.padding_side = "right"
        assert_same_vectors(ours, peer)
    again = open_embedding_model(tmp_path / "step-7")
    assert again.settings == ours.settings and torch.equal(again.encode(TEXTS), ours.encode(TEXTS))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "bert"])
def test_a_folder_that_sentence_transformers_saved_is_opened(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path / "hub", family, is_causal=False)
    peer = theirs(folder, ("cls",), prompts=PROMPTS, similarity_fn_name="dot", truncate_dim=20)
    peer.max_seq_length = 7
    peer.save(str(tmp_path / "theirs"))
    ours = open_embedding_model(tmp_path / "theirs")
    assert ours.settings == EmbeddingSettings(
        pooling="cls",
        causal=False,
        include_prompt=False,
        prompts=PROMPTS,
        max_length=7,
        similarity="dot",
        truncate_dim=20,
    )
    assert ours.encode(TEXTS).shape == (len(TEXTS), 20)
    assert_same_vectors(ours, peer)
    assert_same_vectors(ours, SentenceTransformer(str(save(tmp_path / "ours", ours)), device="cpu"))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_prompts_are_left_out_of_pooling(tmp_path: Path, family: str, pooling: str) -> None:
    folder = write_model(tmp_path / "hub", family)
    settings = EmbeddingSettings(pooling=pooling, include_prompt=False, prompts=PROMPTS, default_prompt="query")
    ours = open_embedding_model(folder, settings)
    peer = SentenceTransformer(str(save(tmp_path / "step-7", ours)), device="cpu")
    assert_same_vectors(ours, peer)
    if family != "bert":
        peer.tokenizer.padding_side = "left"
        assert_same_vectors(ours, peer)
    whole = EmbeddingModel(ours.encoder, replace(settings, include_prompt=True), ours.text_inputs.tokenizer)
    change = largest_distance(whole.encode(TEXTS), ours.encode(TEXTS))
    assert change < NEAR if pooling == "lasttoken" else change > 1e-3


def test_longer_texts_are_cut_alike(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hub", "qwen3")
    ours = open_embedding_model(folder, EmbeddingSettings(max_length=4, dims=(8, 16), truncate_dim=8))
    peer = SentenceTransformer(str(save(tmp_path / "step-7", ours)), device="cpu")
    assert ours.tokenize(TEXTS)["input_ids"].shape == (len(TEXTS), 4)
    assert_same_vectors(ours, peer)
    assert json.loads((tmp_path / "step-7" / "config.json").read_text())["matryoshka_dimensions"] == [8, 16]
    stored = replace(ours.settings, prompts={"query": "", "document": ""})
    assert read_sentence_folder(tmp_path / "step-7").settings == stored


def test_every_version_reads_the_names_of_older_ones(tmp_path: Path) -> None:
    """Folders of the hub have pooling as flags, the encoder in a folder of its own, and max_seq_length."""
    encoder = write_model(tmp_path / "0_Transformer", "bert")
    (encoder / "sentence_bert_config.json").write_text('{"max_seq_length": 6, "do_lower_case": false}')
    paths = {"Transformer": "0_Transformer", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(paths.items())
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "2_Normalize").mkdir()
    (tmp_path / "1_Pooling").mkdir()
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": WIDTH, **flags}))
    ours = open_embedding_model(tmp_path)
    assert ours.settings == EmbeddingSettings(pooling="mean", max_length=6)
    assert_same_vectors(ours, SentenceTransformer(str(tmp_path), device="cpu"))


def edit(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    path = folder / name
    path.write_text(json.dumps(change(json.loads(path.read_text()) if path.exists() else {})))


MODULES, BERT, SENTENCES = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, NORMALIZE = "1_Pooling/config.json", "2_Normalize/config.json"
WRONG: dict[str, tuple[str, Callable[[Any], Any], type[Exception], str]] = {
    "own class": (
        MODULES,
        lambda m: [{**m[0], "type": "custom.Transformer"}],
        holdfast.Unsupported,
        "custom.Transformer",
    ),
    "order": (MODULES, lambda m: [m[0], m[2], m[1]], holdfast.Unsupported, "Transformer, Normalize, Pooling"),
    "no pooling": (MODULES, lambda m: m[:1], holdfast.Unsupported, "the modules Transformer are not supported"),
    "path": (MODULES, lambda m: [{**m[0], "path": "../elsewhere"}, *m[1:]], holdfast.Damaged, "outside of the folder"),
    "no list": (MODULES, lambda m: {"modules": m}, holdfast.Damaged, "expected a list of modules"),
    "max": (POOLING, lambda c: {"pooling_mode": "max"}, holdfast.Unsupported, "pooling mode 'max' is not supported"),
    "two modes": (
        POOLING,
        lambda c: {"pooling_mode": ["cls", "mean"]},
        holdfast.Unsupported,
        "2 pooling modes.*cls, mean",
    ),
    "two flags": (POOLING, lambda c: {**c, "pooling_mode_max_tokens": True}, holdfast.Unsupported, "2 pooling modes"),
    "tokens": (
        NORMALIZE,
        lambda c: {"module_input_name": "token_embeddings"},
        holdfast.Unsupported,
        "module_input_name",
    ),
    "lower case": (BERT, lambda c: {"do_lower_case": True}, holdfast.Unsupported, "do_lower_case=True"),
    "arguments": (
        BERT,
        lambda c: {"config_args": {"is_causal": False}},
        holdfast.Unsupported,
        "config_args has is_causal",
    ),
    "chat": (BERT, lambda c: {"modality_config": {"message": {}}}, holdfast.Unsupported, "chat template"),
    "sparse": (
        SENTENCES,
        lambda c: {"model_type": "SparseEncoder"},
        holdfast.Unsupported,
        "model_type 'SparseEncoder'",
    ),
    "default": (SENTENCES, lambda c: {**c, "default_prompt_name": "x"}, holdfast.Damaged, "default_prompt='x'"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The small files of a saved step."""
    top = tmp_path_factory.mktemp("saved")
    folder = save(top / "step-7", open_embedding_model(write_model(top / "hub", "qwen3"), EmbeddingSettings()))
    paths = [path for path in folder.rglob("*.json") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("name", WRONG)
def test_what_would_change_the_vectors_is_refused(tmp_path: Path, saved: dict[str, bytes], name: str) -> None:
    for path, content in saved.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    read_sentence_folder(tmp_path)
    file, change, error, message = WRONG[name]
    edit(tmp_path, file, change)
    with pytest.raises(error, match=message) as caught:
        read_sentence_folder(tmp_path)
    assert type(caught.value) is error and str(tmp_path) in str(caught.value)


def test_a_dense_layer_of_sentence_transformers_is_refused(tmp_path: Path) -> None:
    peer = theirs(write_model(tmp_path / "hub", "bert"))
    peer.append(Dense(WIDTH, 8))
    peer.save(str(tmp_path / "theirs"))
    with pytest.raises(holdfast.Unsupported, match=r"modules.json: the module Dense \(.*\) is not supported, only"):
        open_embedding_model(tmp_path / "theirs")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hub", "qwen3")
    with pytest.raises(holdfast.NotFound, match=re.escape("has no modules.json")):
        open_embedding_model(folder)
    save(tmp_path / "step-7", open_embedding_model(folder, EmbeddingSettings()))
    (tmp_path / "step-7" / POOLING).unlink()
    with pytest.raises(holdfast.NotFound, match=re.escape("1_Pooling/config.json is missing")):
        open_embedding_model(tmp_path / "step-7")
