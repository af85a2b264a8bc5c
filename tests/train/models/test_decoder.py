"""The decoders are Hugging Face's: transformers opens what is saved and computes the same, and the reverse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import holdfast
from holdfast.train.layout import Layout
from holdfast.train.models.model_config import FAMILIES
from holdfast.train.parallel.model_replica import ModelReplica
from holdfast.train.parallel.parallel_model import build
from tests.dist.train_cases import batches, keyed, model

IDS = batches(1)[0].input_ids


def logits_of(replica: ModelReplica) -> torch.Tensor:
    with torch.no_grad():
        out = replica.module.eval()(IDS)
    return out[0] if isinstance(out, tuple) else out


def opened(folder: Path) -> torch.nn.Module:
    model_class: Any = AutoModelForCausalLM
    theirs, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.eval()


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformers_opens_what_is_saved(tmp_path: Path, family: str, tied: bool) -> None:
    replica = build(model(family, tie_word_embeddings=tied), Layout(), seed=3)
    holdfast.save(tmp_path / "ours", replica.state(), mapping=replica.mapping)
    theirs = opened(tmp_path / "ours")
    assert type(theirs).__name__ == FAMILIES[family].architecture
    with torch.no_grad():
        assert_close(logits_of(replica), theirs(input_ids=IDS).logits)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_save_pretrained_is_loaded(tmp_path: Path, family: str) -> None:
    replica = build(model(family), Layout(), seed=3)
    holdfast.save(tmp_path / "ours", replica.state(), mapping=replica.mapping)
    opened(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    other = build(model(family), Layout(), seed=4)
    assert not torch.equal(logits_of(other), logits_of(replica))
    holdfast.load(tmp_path / "theirs", other.state(), mapping=other.load_mapping)
    assert torch.equal(logits_of(other), logits_of(replica))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_losses_and_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    config = model(family)
    replica = build(config, Layout(), seed=3)
    holdfast.save(tmp_path / "ours", replica.state(), mapping=replica.mapping)
    theirs = opened(tmp_path / "ours")
    ids = IDS[:1]  # they balance experts over a batch, we over each sequence
    labels = torch.cat((ids[:, 1:], torch.full((1, 1), -100)), dim=1)
    sums = replica.forward_backward([type(batches(1)[0])(ids, labels)])
    routed = {"output_router_logits": True} if config.traits.experts else {}
    out = theirs(input_ids=ids, labels=ids, **routed)
    out.loss.backward()
    assert sums.total == pytest.approx(float(out.loss), rel=1e-5)
    if config.traits.experts:
        assert sums.aux_loss == pytest.approx(float(out.aux_loss), rel=1e-5)
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    for key, parameter in replica.parameters().items():
        expected = gradients[key]
        assert parameter.grad is not None and expected is not None
        assert float((parameter.grad - expected).norm() / expected.norm()) < 1e-5, key


def test_recomputing_blocks_gives_the_same_gradients() -> None:
    config = model("qwen3_moe", residual_dropout=0.1, attention_dropout=0.1, embedding_dropout=0.1)
    gradients: list[dict[str, Any]] = []
    for recompute in (False, True):
        replica = build(config, Layout(), seed=3, recompute=recompute)
        replica.forward_backward(keyed(batches(2)))
        gradients.append({key: p.grad for key, p in replica.parameters().items()})
    for key, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][key]), key


def test_dropout_without_keys_is_refused() -> None:
    replica = build(model("llama", residual_dropout=0.1), Layout())
    with pytest.raises(holdfast.InvalidArgument, match="sample_keys"):
        replica.forward_backward(batches(1))


def test_bfloat16_computes_with_fp32_parameters_and_gradients() -> None:
    config = model("qwen3_moe")
    replica = build(config, Layout(), dtype=torch.bfloat16, seed=3)
    exact = build(config, Layout(), seed=3)
    rounded, full = replica.forward_backward(batches(2)), exact.forward_backward(batches(2))
    assert rounded.loss != full.loss and rounded.loss == pytest.approx(full.loss, rel=0.02)
    assert {p.dtype for p in replica.module.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in replica.module.parameters()} == {torch.float32}
