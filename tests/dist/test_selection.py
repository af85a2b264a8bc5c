"""`only=` and `ignore=` of saves on real ranks: the same bytes on every mesh, the same error on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import holdfast
from tests.dist.harness import run_ranks

PATTERNS: dict[str, Any] = {"only": ["model", "optimizer", "epoch"], "ignore": ["*exp_avg_sq", "1.bias*"]}


class Position:
    """A position that differs between ranks."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def make(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    if dist.get_world_size() > 1:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": seed, "position": Position(dist.get_rank())}


def _save(root: str) -> None:
    state = make(3)
    holdfast.save(f"{root}/blocking-{dist.get_world_size()}", state, **PATTERNS)
    with holdfast.Checkpointer(f"{root}/run-{dist.get_world_size()}", **PATTERNS) as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.save(2, state).result(60)


def _restore(root: str, world: int) -> None:
    state = make(4)
    with holdfast.Checkpointer(f"{root}/run-{world}", **PATTERNS) as checkpointer:
        assert checkpointer.restore(state) == 2
    expected = make(3)["model"].state_dict()
    for key, value in state["model"].state_dict().items():
        same = [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for tensor in (value, expected[key])]
        assert torch.equal(*same) is (key != "1.bias"), key
    assert state["epoch"] == 3 and state["position"].at == dist.get_rank()


def _wrong(root: str) -> None:
    rank = dist.get_rank()
    wrong: tuple[tuple[dict[str, Any], Any], ...] = (
        ({"only": ["model" if rank else "optimizer"]}, holdfast.InvalidArgument),
        ({"only": ["model"] if rank else []}, holdfast.InvalidArgument),
        ({"ignore": ["missing"]}, holdfast.Mismatch),
        ({"ignore": ["*"]}, holdfast.InvalidArgument),
    )
    for patterns, error in wrong:
        with pytest.raises(error):
            holdfast.save(f"{root}/wrong", make(3), **patterns)
    own: dict[str, Any] = {"only": ["stage0"]}  # an entry that only one rank has
    state = {"stage0": torch.ones(2)} if rank == 0 else {"stage1": torch.ones(3)}
    assert holdfast.save(f"{root}/stages", state, **own).keys() == ["stage0"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


@pytest.mark.full
def test_a_selection_has_the_same_bytes_on_every_mesh(tmp_path: Path) -> None:
    for world in (1, 2):
        run_ranks(world, _save, str(tmp_path))
    expected = files_of(tmp_path / "blocking-1")
    assert expected and holdfast.open(tmp_path / "blocking-2").keys("model") == ["0.bias", "0.weight", "1.weight"]
    for folder in (tmp_path / "blocking-2", *tmp_path.glob("run-*/step-*")):
        assert files_of(folder) == expected, folder
    run_ranks(2, _restore, str(tmp_path), 1)


def test_a_wrong_selection_is_the_same_error_on_every_rank(tmp_path: Path) -> None:
    run_ranks(2, _wrong, str(tmp_path))
