"""A run begins with a folder that transformers saved, of every family and on any layout: the loss is transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from holdfast.train.config import RunConfig, TrainConfig
from holdfast.train.data.datasets import DataConfig, open_datasets
from holdfast.train.layout import Layout
from holdfast.train.loop import Trainer
from holdfast.train.models.model_config import ModelConfig
from tests.dist.harness import run_ranks
from tests.dist.train_cases import model

pytestmark = pytest.mark.full  # transformers' folders of five families

SAMPLES, LENGTH = 8, 8
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16},
    "qwen2_moe": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts_per_tok": 3},
}
LAYOUTS = {
    "one": Layout(),
    "pp-2": Layout(pp=2),
    "tp-2-pp-2": Layout(tp=2, pp=2),
    "fsdp-3": Layout(dp_shard=3),
    "ep-2-hsdp-2x2": Layout(dp_replicate=2, dp_shard=2, ep=2),
    "pp-2-interleaved": Layout(pp=2, schedule="interleaved", stages_per_rank=2),
}


def _settings(family: ModelConfig, folder: Path, layout: Layout, pretrained: str) -> RunConfig:
    data = DataConfig(samples=2 * SAMPLES, sequence=LENGTH, evaluation_samples=SAMPLES)
    train = TrainConfig(folder=str(folder), steps=1, start_from=pretrained, global_batch=24, micro_batch=1)
    return RunConfig(family, layout, data, train=train)


def _losses(root: Path, layout: Layout) -> dict[str, float]:
    """What every family's loss is with the folder's weights, before a step is made."""
    found = {}
    for family in FAMILIES:
        stored = root / family
        theirs = ModelConfig.from_hf(json.loads((stored / "config.json").read_text()))
        if layout.ep > 1 and not theirs.traits.experts:
            continue
        trainer = Trainer(_settings(theirs, stored / str(layout), layout, str(stored)))
        trainer._load_weights(str(stored))
        sums = trainer.evaluate()
        assert sums is not None
        trainer.metrics.close()
        found[family] = sums.loss
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Folders of transformers' own making, and the loss that it finds."""
    root = tmp_path_factory.mktemp("pretrained")
    expected = {}
    for number, (family, changes) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        said = model(family, **changes).to_hf()
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**said)).float().eval()
        theirs.save_pretrained(root / family, max_shard_size="20KB")
        settings = _settings(model(family, **changes), root, Layout(), "")
        _, dataset = open_datasets(settings.data, settings.model.vocab_size)
        assert dataset is not None
        tokens = torch.from_numpy(dataset.read(torch.arange(SAMPLES).numpy()))
        with torch.no_grad():
            logits = theirs(input_ids=tokens[:, :-1]).logits
        expected[family] = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    return root, expected


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_family_begins_with_the_weights_of_transformers(saved: tuple[Path, dict[str, float]], name: str) -> None:
    root, expected = saved
    for found in run_ranks(LAYOUTS[name].world, _losses, root, LAYOUTS[name], deadline_s=200):
        assert found
        for family, loss in found.items():
            assert loss == pytest.approx(expected[family], rel=1e-5), family
