"""The [model] of an encoder of transformers: what it may be, on which layouts, and what its identity compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import T5Config, T5Model

from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.train.embedding.trainer.encoder_config import EncoderConfig, EncoderIdentity
from holdfast.train.layout import Layout
from tests.dist.embedding_cases import config
from tests.train.embedding.tiny_models import write_model


def test_sizes_are_those_of_the_folder(tmp_path: Path) -> None:
    found = EncoderConfig(str(write_model(tmp_path / "bert", "bert")), {"hidden_dropout_prob": 0.3})
    assert (found.family, found.hidden_size, found.max_position_embeddings) == ("bert", 32, 64)
    assert found.hub_config().hidden_dropout_prob == 0.3 and not found.hub_config().use_cache


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 2}, "tp=2 divides a model, which encoders of transformers .bert. do not support"),
        ({"pp": 2, "dp_shard": 2}, "pp=2 divides a model"),
        ({"ep": 2, "dp_shard": 2}, "ep=2 divides a model"),
    ],
)
def test_layouts_that_divide_the_encoder_are_refused_by_name(tmp_path: Path, layout: Any, message: str) -> None:
    found = config(tmp_path, tmp_path, layout, encoder=write_model(tmp_path / "bert", "bert"))
    with pytest.raises(Unsupported, match=message):
        found.check(found.layout.world)


def test_layouts_that_do_not_fit_the_ranks(tmp_path: Path) -> None:
    found = EncoderConfig(str(write_model(tmp_path / "bert", "bert")))
    with pytest.raises(InvalidArgument, match=r"needs 2 ranks .* but there are 3"):
        found.check_layout(Layout(dp_shard=2), 3)
    with pytest.raises(InvalidArgument, match="zero1 supports only dp_replicate"):
        found.check_layout(Layout(dp_shard=2, dp_replicate=2, zero1=True), 4)


def _t5(folder: Path) -> Path:
    sizes: Any = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 20}
    T5Model(T5Config(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("make", "table", "kind", "message"),
    [
        (lambda at: at / "none", {}, NotFound, "is not a folder: download the model"),
        (lambda at: write_model(at / "qwen3", "qwen3"), {}, InvalidArgument, "a decoder that the trainer has itself"),
        (
            lambda at: write_model(at / "bert", "bert"),
            {"model__changes": "{ hiden_act = 1 }"},
            InvalidArgument,
            "hidden_act",
        ),
        (
            lambda at: write_model(at / "bert", "bert"),
            {"model__family": "bert"},
            InvalidArgument,
            "no setting model.family",
        ),
        (lambda at: write_model(at / "bert", "bert"), {"embedding__dims": "[64]"}, InvalidArgument, "dims=64 is more"),
        (_t5, {}, Unsupported, "t5 is an encoder-decoder"),
    ],
    ids=["missing", "decoder", "change", "family", "dims", "encoder-decoder"],
)
def test_what_is_no_encoder_is_named(
    tmp_path: Path, make: Any, table: Any, kind: type[HoldfastError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        config(tmp_path, tmp_path, encoder=make(tmp_path), **table).check_sizes()


def test_identity_compares_what_vectors_depend_on(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "bert", "bert"))
    saved = EncoderIdentity(EncoderConfig(folder).hub_config()).state_dict()
    EncoderIdentity(EncoderConfig(folder, {"attention_probs_dropout_prob": 0.5}).hub_config()).load_state_dict(saved)
    EncoderIdentity(EncoderConfig(folder).hub_config()).load_state_dict({**saved, "a_setting_of_later": 1})
    with pytest.raises(Mismatch, match="num_attention_heads=4, not 2"):
        EncoderIdentity(EncoderConfig(folder, {"num_attention_heads": 2}).hub_config()).load_state_dict(saved)
    with pytest.raises(Mismatch, match="no model_type"):
        EncoderIdentity(EncoderConfig(folder).hub_config()).load_state_dict({"hidden_size": 32})
