"""Random streams: by purpose and place, exact on the same mesh, derived again on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from holdfast.train.rng import DISTINCT, EXPERT, PURPOSES, SHARED, MeshPosition, PurposeStreams, derive_seed
from tests.dist.harness import run_ranks


def spot(**places: tuple[int, int]) -> MeshPosition:
    return MeshPosition(
        {axis: size for axis, (_, size) in places.items()}, {axis: place for axis, (place, _) in places.items()}
    )


def draws(streams: PurposeStreams, purpose: str, count: int = 4) -> list[float]:
    with streams.use(purpose):
        return torch.rand(count).tolist()


def test_shared_is_shared_along_tp_alone():
    ranks = [spot(dp_shard=(dp, 2), tp=(tp, 2)) for dp in range(2) for tp in range(2)]
    shared = [draws(PurposeStreams(5, rank), SHARED) for rank in ranks]
    assert shared[0] == shared[1] != shared[2] == shared[3]
    for purpose in (DISTINCT, EXPERT):
        assert len({tuple(draws(PurposeStreams(5, rank), purpose)) for rank in ranks}) == 4


def test_purposes_do_not_disturb_each_other_or_the_caller():
    one, other = PurposeStreams(1, spot()), PurposeStreams(1, spot())
    torch.manual_seed(9)
    expected = torch.rand(3).tolist()
    torch.manual_seed(9)
    draws(one, EXPERT, 100)
    assert torch.rand(3).tolist() == expected
    assert draws(one, SHARED) == draws(other, SHARED)
    assert draws(one, SHARED) == draws(other, SHARED), "it goes on where it was"
    assert draws(one, EXPERT) != draws(other, EXPERT)


def test_seeds_depend_on_everything():
    place = spot(dp_shard=(1, 2))
    seeds = {derive_seed(seed, step, purpose, place) for seed in (1, 2) for step in (0, 7) for purpose in PURPOSES}
    assert len(seeds) == 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_on_the_same_spot_they_go_on():
    streams = PurposeStreams(3, spot(tp=(1, 2)))
    draws(streams, DISTINCT, 11)
    streams.step = 8
    saved = streams.state_dict()
    expected = draws(streams, DISTINCT)
    again = PurposeStreams(3, spot(tp=(1, 2), pp=(0, 1)))
    again.load_state_dict(saved)
    assert draws(again, DISTINCT) == expected
    assert (again.step, again.derived) == (8, "")


def test_elsewhere_they_are_derived_anew_and_say_so():
    streams = PurposeStreams(3, spot())
    streams.step = 8
    moved = PurposeStreams(3, spot(dp_shard=(1, 4)))
    moved.load_state_dict(streams.state_dict())
    assert "derived again" in moved.derived and "one rank" in moved.derived and "dp_shard=4" in moved.derived
    expected = torch.Generator().manual_seed(derive_seed(3, 8, SHARED, spot(dp_shard=(1, 4))))
    assert draws(moved, SHARED) == torch.rand(4, generator=expected).tolist()


def test_an_unknown_purpose_is_refused():
    with pytest.raises(holdfast.InvalidArgument, match="shared, distinct, expert"), PurposeStreams(1, spot()).use("x"):
        pass


class _Noise(nn.Module):
    """A user's own module on one rank of a tensor group, with each purpose where it belongs."""

    def __init__(self, streams: PurposeStreams) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, whole: torch.Tensor, part: torch.Tensor, routed: int) -> list[torch.Tensor]:
        """`whole` is on every rank of the group, `part` is this rank's slice, and so many rows were sent here."""
        with self.streams.use(SHARED):
            whole = whole + torch.randn_like(whole)
        with self.streams.use(EXPERT):
            rows = torch.randn(routed, 3)
        return [whole, part + torch.randn_like(part), rows]


def _noise(streams: PurposeStreams, routed: int) -> list[torch.Tensor]:
    """As the trainer does it: all of a forward pass within DISTINCT."""
    with streams.use(DISTINCT):
        return _Noise(streams)(torch.zeros(6), torch.zeros(3), routed)


def test_which_purpose_is_for_what():
    ranks = [PurposeStreams(5, spot(tp=(place, 2))) for place in range(2)]
    other = PurposeStreams(5, spot(tp=(0, 2)))
    for routed in (1, 9, 2):
        outs = [_noise(ranks[0], 4), _noise(ranks[1], routed)]
        assert torch.equal(outs[0][0], outs[1][0]), "what the group has whole stays the same on every rank"
        assert not torch.equal(outs[0][1], outs[1][1]), "slices of one activation get noise of their own"
        assert not torch.equal(outs[0][2][0], outs[1][2][0]), "and so do experts"
        elsewhere = _noise(other, 7 * routed)
        assert torch.equal(elsewhere[0], outs[0][0]) and torch.equal(elsewhere[1], outs[0][1]), (
            "however many rows an expert got, it disturbs no other stream"
        )


def _mesh_streams(sizes: tuple[int, int]) -> tuple[PurposeStreams, Any]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "tp"))
    place = {axis: (mesh.get_local_rank(axis), mesh[axis].size()) for axis in ("dp_shard", "tp")}
    return PurposeStreams(5, spot(**place)), mesh


def _save(root: str) -> dict[str, list[float]]:
    streams, mesh = _mesh_streams((2, 2))
    for purpose in PURPOSES:
        draws(streams, purpose, 10 + dist.get_rank())
    streams.step = 12
    holdfast.save(root, {"random": streams}, step=12, mesh=mesh)
    return {purpose: draws(streams, purpose) for purpose in PURPOSES}


def _load(root: str, sizes: tuple[int, int]) -> tuple[dict[str, list[float]], str]:
    streams, mesh = _mesh_streams(sizes)
    holdfast.load(root, {"random": streams}, mesh=mesh)
    return {purpose: draws(streams, purpose) for purpose in PURPOSES}, streams.derived


@pytest.mark.full
def test_every_rank_gets_its_own_back_and_another_mesh_derives(tmp_path: Path):
    root = str(tmp_path / "c")
    saved = run_ranks(4, _save, root, deadline_s=60)
    assert len({str(each) for each in saved}) == 4
    assert run_ranks(4, _load, root, (2, 2), deadline_s=60) == [(each, "") for each in saved]
    turned = run_ranks(4, _load, root, (4, 1), deadline_s=60)
    assert all("derived again" in note for _, note in turned)
    assert len({str(each) for each, _ in turned}) == 4
    alone = run_ranks(1, _load, root, (1, 1), deadline_s=60)
    assert "one rank" in alone[0][1]


def test_another_seed_derives_and_says_so() -> None:
    streams, other = PurposeStreams(3, spot()), PurposeStreams(4, spot())
    fresh = other.state_dict()["streams"][SHARED]
    other.load_state_dict(streams.state_dict())
    assert "seed 3" in other.derived and "has seed 4" in other.derived
    assert torch.equal(other.state_dict()["streams"][SHARED], fresh)
