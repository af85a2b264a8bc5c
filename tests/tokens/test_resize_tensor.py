"""Tokens added to models that ranks shard with FSDP2, tensor parallelism, and both, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import holdfast
from tests.dist.harness import run_ranks
from tests.tokens.vocabularies import WORDS, causal_model, logits, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

IDS = [0, 3, 4, 5, 6, 7, 8, 1]
NEW = ["<think>", "</think>"]
LAYOUTS = {"fsdp": (2, 1), "tp": (1, 2), "fsdp-3": (3, 1), "fsdp-tp": (2, 2)}
QUICK = ("fsdp",)
DEADLINE_S = 200.0


def sharded(model: Any, dp: int, tp: int, *, tied: bool) -> Any:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    if tp > 1:
        plan: dict[str, Any] = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan)
        if tied:
            model.lm_head.weight = model.model.embed_tokens.weight
    if dp > 1:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def step(model: Any, optimizer: Any, ids: list[int]) -> None:
    optimizer.zero_grad()
    scores = model(torch.tensor([ids])).logits[0]
    torch.nn.functional.cross_entropy(scores[:-1].float(), torch.tensor(ids[1:])).backward()
    optimizer.step()


def story(model: Any, folder: str) -> dict[str, Any]:
    """Step, add tokens in place and by growing, save, step again on the new tokens, save."""
    words = tokenizer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, IDS)
    before = logits(model, IDS)
    padded = holdfast.tokens.add(model, words, ["<a>"], optimizer=optimizer, pad_to=16)  # takes padding
    grown = holdfast.tokens.add(model, words, NEW, optimizer=optimizer, pad_to=4)
    after = logits(model, IDS)
    state = {"model": model, "optimizer": optimizer}
    holdfast.save(f"{folder}/grown", state)
    step(model, optimizer, [0, 16, 17, 15, 3, 1])
    holdfast.save(f"{folder}/stepped", state)
    return {
        "old": torch.equal(before[:, :15], after[:, :15]),
        "rows": (padded.rows_before, padded.rows, grown.rows),
        "logits": (after.full_tensor() if isinstance(after, DTensor) else after).numpy(),
        "states": len(optimizer.state),
    }


def _on_ranks(layout: str, tied: bool, folder: str) -> dict[str, Any]:
    return story(sharded(causal_model(rows=16, tied=tied), *LAYOUTS[layout], tied=tied), folder)


def _values(folder: Path) -> dict[str, Any]:
    checkpoint = holdfast.open(folder)
    return {
        f"{group}/{key}": checkpoint.read(key, group) for group in checkpoint.groups for key in checkpoint.keys(group)
    }


@pytest.mark.parametrize(
    ("layout", "tied"),
    [
        pytest.param(layout, tied, marks=() if layout in QUICK and tied else pytest.mark.full)
        for layout in LAYOUTS
        for tied in (True, False)
    ],
)
def test_sharded_models_grow_like_whole_ones(layout: str, tied: bool, tmp_path: Path) -> None:
    world = LAYOUTS[layout][0] * LAYOUTS[layout][1]
    answers = run_ranks(world, _on_ranks, layout, tied, str(tmp_path / "ranks"), deadline_s=DEADLINE_S)
    whole = story(causal_model(rows=16, tied=tied), str(tmp_path / "one"))
    assert whole["rows"] == (16, 16, 20)
    for answer in answers:
        assert answer["old"]
        assert answer["rows"] == whole["rows"]
        assert answer["states"] == whole["states"]
        assert abs(answer["logits"] - whole["logits"]).max() < 1e-5
    for name in ("grown", "stepped"):
        ranks, one = _values(tmp_path / "ranks" / name), _values(tmp_path / "one" / name)
        assert ranks.keys() == one.keys()
        assert ranks["model/model.embed_tokens.weight"].shape == (20, 32)
        for key, value in one.items():
            assert abs(ranks[key] - value).max(initial=0) < 1e-4, f"{name}: {key}"
        assert len(WORDS) == 15
