"""Checkpoints of the trainer: the same bytes from every layout, and transformers at both ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import holdfast
from holdfast.train.layout import Layout
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.model_replica import ModelReplica
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.train_cases import LAYOUTS, assemble, batches, model, pieces, share

pytestmark = pytest.mark.sliced(24)

DEADLINE_S = 200.0
# Many blocks and files, cuts in the middle of tensors.
CUT: dict[str, Any] = {"block_bytes": 4096, "max_shard_size": 30_000}
MODELS = {"qwen3_moe": model("qwen3_moe"), "qwen2_moe": model("qwen2_moe", tie_word_embeddings=True)}
MICRO_BATCHES = 4


def trained(config: ModelConfig, layout: Layout, steps: int, seed: int = 0) -> ModelReplica:
    replica = build(config, layout, seed=seed)
    optimizer = replica.make_optimizer(lr=0.01, eps=1e-6, weight_decay=0.1)
    for step in range(steps):
        train(replica, optimizer, step)
    return replica


def train(replica: ModelReplica, optimizer: Any, step: int) -> None:
    replica.forward_backward(share(replica, batches(MICRO_BATCHES, seed=step)))
    replica.clip(1.0)
    optimizer.step()


def save(replica: ModelReplica, path: Path) -> None:
    holdfast.save(path, replica.state(), step=2, mapping=replica.mapping, **CUT)


def _load_and_save(layout: Layout, alone: Path, pretrained: Path, out: Path) -> dict[str, Any]:
    """From another seed and a step taken, so that everything is there and wrong."""
    answer = {}
    for name, config in MODELS.items():
        replica = trained(config, layout, 1, seed=9)
        holdfast.load(alone / name, replica.state(), mapping=replica.load_mapping)
        save(replica, out / name)
        train(replica, replica.optimizer, 2)
        answer[name] = pieces(replica.parameters())
    replica = build(MODELS["qwen3_moe"], layout, seed=9)
    holdfast.load(pretrained, replica.state(), mapping=replica.load_mapping)
    return answer | {"pretrained": pieces(replica.parameters())}


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if "safetensors" in file.name}


@dataclass(frozen=True)
class Truth:
    """What one process saved after two steps and had after three, and a folder that transformers saved."""

    alone: Path
    after: dict[str, dict[str, torch.Tensor]]
    pretrained: Path
    weights: dict[str, torch.Tensor]


def _ep_4(path: Path) -> Any:
    replica = trained(MODELS["qwen3_moe"], LAYOUTS["ep-4"], 2)
    save(replica, path)
    with torch.no_grad():
        return replica.module.eval()(batches(1)[0].input_ids)[0].numpy()


def opened(folder: Path) -> Any:
    model_class: Any = AutoModelForCausalLM
    theirs, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return theirs.eval()


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    root = tmp_path_factory.mktemp("truth")
    after = {}
    for name, config in MODELS.items():
        replica = trained(config, Layout(), 2)
        save(replica, root / name)
        train(replica, replica.optimizer, 2)
        after[name] = assemble([pieces(replica.parameters())])
    theirs = opened(root / "qwen3_moe")
    theirs.save_pretrained(root / "pretrained")
    return Truth(root, after, root / "pretrained", theirs.state_dict())


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_state_goes_through_every_layout_and_stays_the_same_bytes(truth: Truth, tmp_path: Path, layout: str) -> None:
    arguments = (LAYOUTS[layout], truth.alone, truth.pretrained, tmp_path)
    found = run_ranks(LAYOUTS[layout].world, _load_and_save, *arguments, deadline_s=DEADLINE_S)
    for name in MODELS:
        expected, saved = tensor_files(truth.alone / name), tensor_files(tmp_path / name)
        assert sorted(saved) == sorted(expected)
        for file, data in expected.items():
            assert saved[file] == data, f"{name}: {file}"
        weights = assemble([rank[name] for rank in found])
        for key, value in truth.after[name].items():
            # Adam makes steps of one size from gradients of any size, and so from their last bits.
            assert float((weights[key] - value).norm() / value.norm()) < 1e-4, f"{name} after the next step: {key}"
    loaded = assemble([rank["pretrained"] for rank in found])
    assert sorted(loaded) == sorted(truth.weights)
    assert all(torch.equal(loaded[key], value) for key, value in truth.weights.items())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_experts_have_keys_of_their_own_with_global_numbers(truth: Truth) -> None:
    keys = holdfast.open(truth.alone / "qwen3_moe").keys("model")
    for number in range(MODELS["qwen3_moe"].num_experts):
        assert f"model.layers.3.mlp.experts.{number}.up_proj.weight" in keys
    assert not [key for key in keys if key.endswith("gate_up_proj")]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_transformers_opens_what_ep_4_wrote_and_gives_the_live_logits(tmp_path: Path) -> None:
    live = run_ranks(4, _ep_4, tmp_path, deadline_s=DEADLINE_S)
    with torch.no_grad():
        logits = opened(tmp_path)(input_ids=batches(1)[0].input_ids).logits
    for rank in live:
        assert float((logits - torch.from_numpy(rank)).abs().max()) < 1e-5 * float(logits.abs().max())
