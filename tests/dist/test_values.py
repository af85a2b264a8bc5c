"""Values that are not tensors: one for all, or by the mesh axes on which they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from tests.dist.harness import run_ranks


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


@pytest.mark.full
def test_another_size_of_the_axis_is_refused_with_the_way_out(saved: str) -> None:
    errors = run_ranks(3, _load, saved, (3,), ("dp",), Loader, [])
    assert len(set(errors)) == 1
    assert "loader" in errors[0] and "dp=2" in errors[0] and "dp=3" in errors[0] and "holdfast_reshard" in errors[0]
    assert run_ranks(3, _load, saved, (3,), ("dp",), Loader, ["loader"])[0][0] == -1


def test_an_object_that_knows_how_reshards_itself(saved: str) -> None:
    found = run_ranks(3, _load, saved, (3,), ("dp",), Resharding, [])
    assert [position for position, *_ in found] == [100, 101, 102]
    assert found[0][1] == [0, 1, 2, 100, 101, 102]


class Random:
    """What the error about tensors that differ between ranks advises: an object with the state of this rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


def _each_its_own(root: str) -> tuple[str, bool, bool]:
    torch.manual_seed(dist.get_rank())
    with pytest.raises(holdfast.LayoutError) as caught:
        holdfast.save(f"{root}/x", {"rng": {"torch": torch.get_rng_state()}})
    holdfast.save(f"{root}/y", {"rng": Random(), "n": 1})
    expected = torch.rand(5)
    torch.manual_seed(77)
    holdfast.load(f"{root}/y", {"rng": Random(), "n": None})
    blocking = torch.equal(torch.rand(5), expected)
    with holdfast.Checkpointer(f"{root}/run") as checkpointer:
        checkpointer.save(1, {"rng": Random()}).result(60)
        expected = torch.rand(5)
        torch.manual_seed(77)
        checkpointer.restore({"rng": Random()})
        return str(caught.value), blocking, torch.equal(torch.rand(5), expected)


def test_what_is_advised_for_values_of_each_rank_works(tmp_path: Path) -> None:
    for text, *good in run_ranks(2, _each_its_own, str(tmp_path)):
        assert "rng: torch has different values on rank 0 and rank 1" in text and "replicas=" not in text
        assert "an object with state_dict() and load_state_dict(): state['rng'] = your object" in text
        assert good == [True, True]


def _drift_apart(root: str, count: int) -> list[str]:
    """Ranks begin with one seed, and draw differently later."""
    state: dict[str, Any] = {
        "rng": {"torch": torch.manual_seed(0).get_state(), "numpy": np.zeros(count)},
        "model": nn.Linear(2, 2),
    }
    torch.distributed.broadcast(state["model"].weight.data, 0)
    torch.distributed.broadcast(state["model"].bias.data, 0)
    out = []
    with holdfast.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state).result(60)
        state["rng"]["numpy"] += dist.get_rank()
        with pytest.warns(holdfast.HoldfastWarning, match="rng: numpy has different values"):
            try:
                checkpointer.save(3, state).result(60)
            except holdfast.HoldfastError as error:
                out.append(str(error))
            checkpointer.finish()
        state["rng"]["numpy"][:] = 5
        checkpointer.save(4, state).result(60)
    return out


@pytest.mark.parametrize("count", [3, 300_000])
def test_values_that_drift_apart_after_the_first_save_are_noticed(tmp_path: Path, count: int) -> None:
    for errors in run_ranks(2, _drift_apart, str(tmp_path), count):
        assert len(errors) == 1 and "rng: numpy has different values on rank 0 and rank 1" in errors[0]
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [f"step-{step:012}" for step in (1, 2, 4)]


def _tensors_by_rank(root: str) -> list[Any]:
    """A tree whose plain values differ by rank: its tensors are replicas under one key, also for a placeholder."""
    rank = dist.get_rank()
    holdfast.save(root, {"d": {"t": torch.ones(2), "n": rank, "l": [torch.ones(1), rank]}})
    filled: dict[str, Any] = {"d": {"t": torch.zeros(2), "n": -1, "l": [torch.zeros(1), -1], "stale": 1}}
    holdfast.load(root, filled)
    empty: dict[str, Any] = {"d": None}
    holdfast.load(root, empty)
    return [[s["d"]["t"].tolist(), s["d"]["n"], s["d"]["l"][1], sorted(s["d"])] for s in (filled, empty)]


def test_plain_values_beside_tensors_come_back_on_their_rank(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, _tensors_by_rank, str(tmp_path / "x"))):
        assert found == [[[1.0, 1.0], rank, rank, ["l", "n", "t"]]] * 2


class Dtypes(Loader):
    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.state |= {
            "half": torch.full((2,), position).bfloat16(),
            "complex": torch.full((1,), 1j).to(torch.complex128),
        }

    def holdfast_reshard(self, states: dict[tuple[int, ...], Any], rank: int, world: int) -> dict[str, Any]:
        return states[0,]


def _reshard_dtypes(root: str, save: bool) -> Any:
    state = {"loader": Dtypes(dist.get_rank())}
    if save:
        holdfast.save(root, state)
        return None
    holdfast.load(root, state)
    loaded = state["loader"].state
    return [fact for key in ("half", "complex") for fact in (str(loaded[key].dtype), loaded[key].tolist())]


def test_resharding_hands_over_every_dtype(tmp_path: Path) -> None:
    run_ranks(2, _reshard_dtypes, str(tmp_path / "x"), True)
    assert run_ranks(1, _reshard_dtypes, str(tmp_path / "x"), False) == [
        ["torch.bfloat16", [0.0, 0.0], "torch.complex128", [1j]]
    ]


def _resized(root: str) -> list[Any]:
    mesh = init_device_mesh("cpu", (1,))
    holder = Loader(0)
    holder.state = {"w": distribute_tensor(torch.ones(4), mesh, [Shard(0)])}
    holdfast.save(root, {"holder": holder, "n": 1})
    live = Loader(0)
    kept = live.state = {"w": distribute_tensor(torch.zeros(6), mesh, [Shard(0)])}
    with pytest.warns(holdfast.HoldfastWarning, match="holder: w: the shape differs"):
        report = holdfast.load(root, {"holder": live, "n": None}, strict=False)
    return [live.state is kept, report.values]


def test_a_value_that_cannot_be_filled_is_not_handed_over(tmp_path: Path) -> None:
    """A load that is not strict must not give an object memory without values."""
    assert run_ranks(1, _resized, str(tmp_path / "x")) == [[True, 1]]
