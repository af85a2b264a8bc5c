"""Values that are not tensors: one for all, or by the mesh axes on which they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from dist.harness import run_ranks


class Loader:
    """A data position, with a tensor in it, that differs between data-parallel ranks."""

    def __init__(self, position: int) -> None:
        self.state: dict[str, Any] = {"position": position, "seeds": torch.arange(3) + position, "kind": ("a", None)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Resharding(Loader):
    def holdfast_reshard(self, states: dict[tuple[int, ...], Any], rank: int, world: int) -> dict[str, Any]:
        total = sum(state["position"] for state in states.values())
        return {
            "position": total + rank,
            "seeds": torch.cat([s["seeds"] for _, s in sorted(states.items())]),
            "kind": 0,
        }


def build(sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[dict[str, Any], Any]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = fully_shard(nn.Linear(6, 6), mesh=mesh["dp"])
    return {"model": model, "note": {"same": True}}, mesh


def _save(root: str) -> list[str]:
    state, mesh = build((2, 2), ("dp", "tp"))
    state["loader"] = Loader(100 * mesh["dp"].get_local_rank())
    state["rng"] = Loader(dist.get_rank())
    checkpoint = holdfast.save(root, state, mesh=mesh)
    assert "axes" not in checkpoint.state["note"]
    assert checkpoint.state["loader"]["axes"] == ["dp"]
    assert checkpoint.state["rng"]["axes"] == ["dp", "tp"]
    return checkpoint.keys("loader")


def _load(root: str, sizes: tuple[int, ...], names: tuple[str, ...], kind: type, ignore: list[str]) -> Any:
    state, mesh = build(sizes, names)
    state["loader"] = kind(-1)
    state["note"] = None
    try:
        holdfast.load(root, state, mesh=mesh, ignore=ignore)
    except holdfast.Mismatch as error:
        return str(error)
    assert state["note"] == {"same": True}
    found = state["loader"].state
    return found["position"], found["seeds"].tolist(), found["kind"], mesh.get_local_rank("dp")


@pytest.fixture
def saved(tmp_path: Path) -> str:
    keys = run_ranks(4, _save, str(tmp_path / "x"))[0]
    assert keys == ["seeds@dp=0", "seeds@dp=1"], "ranks that agree share one tensor"
    return str(tmp_path / "x")


def test_restored_by_coordinate_when_another_axis_changes(saved: str) -> None:
    for position, seeds, kind, dp in run_ranks(2, _load, saved, (2,), ("dp",), Loader, []):
        assert position == 100 * dp
        assert seeds == [position, position + 1, position + 2]
        assert kind == ("a", None)


def test_another_size_of_the_axis_is_refused_with_the_way_out(saved: str) -> None:
    errors = run_ranks(3, _load, saved, (3,), ("dp",), Loader, [])
    assert len(set(errors)) == 1
    assert "loader" in errors[0] and "dp=2" in errors[0] and "dp=3" in errors[0] and "holdfast_reshard" in errors[0]
    assert run_ranks(3, _load, saved, (3,), ("dp",), Loader, ["loader"])[0][0] == -1


def test_an_object_that_knows_how_reshards_itself(saved: str) -> None:
    found = run_ranks(3, _load, saved, (3,), ("dp",), Resharding, [])
    assert [position for position, *_ in found] == [100, 101, 102]
    assert found[0][1] == [0, 1, 2, 100, 101, 102]
