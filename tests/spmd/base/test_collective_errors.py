"""Calls that are collectives with the rules, made by one rank alone: the timeout's error names them."""

from __future__ import annotations

import traceback
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from holdfast.spmd.base.call import bind
from holdfast.spmd.sharding.gathered_views import gathered_view
from tests.dist.harness import run_ranks

TIMEOUT_S = 1.0

PARTIAL_CALLS = {  # of a number that is a sum: with torch alone each is local, or raises
    "item": (lambda x: x.item(), "_local_scalar_dense"),
    "float": (float, "_local_scalar_dense"),
    "bool": (bool, "_local_scalar_dense"),
    "format": (lambda x: f"{x:.3f}", "_local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "DTensor.tolist()"),
}
SHARDED_CALLS = {  # of rows that are sharded
    "contains": (lambda x: 3.0 in x, "_local_scalar_dense"),
    "any": (lambda x: bool((x > 1).any()), "_local_scalar_dense"),
    "allclose": (lambda x: torch.allclose(x, x + 1), "is a collective"),
    "max": (lambda x: x.max(), "aten.max.default"),
    "tolist": (lambda x: x.tolist(), "DTensor.tolist()"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero.default"),
    "mask": (lambda x: x[x > 1], "x[mask]"),
    "list": (lambda x: x[[0, 3]], "x[indices]"),
    "rows": (list, "a loop over the rows"),
    "slice": (lambda x: x[1:3], "x[a:b]"),
    "stale view": (lambda x: _stale(x).to_local(), "DTensor.to_local() of a view"),
    "set": (lambda x: x.__setitem__(slice(0, 4), x + 1), "x[a:b] = v"),
    "set otherwise sharded": (lambda x: x.__setitem__(slice(0, 3), x[:, :3].t()), "is a collective"),
}


def _stale(x: DTensor) -> DTensor:
    """Return a gathered view, made without the other rank, whose tensor was written since."""
    rows = gathered_view(x * 1, bind(torch.ops.aten.slice.Tensor, (x, 0, 0, 4), {}))
    x.add_(1.0)
    return rows


def _number(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.tensor(2.0), mesh, [Partial()], run_check=False)


def _rows(mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(torch.arange(16.0).reshape(4, 4), mesh, [Shard(0)], src_data_rank=None)


CALLS = {
    **{f"{name} of a Partial": (_number, *call) for name, call in PARTIAL_CALLS.items()},
    **{f"{name} of shards": (_rows, *call) for name, call in SHARDED_CALLS.items()},
}


def _alone() -> dict[str, str]:
    """On rank 0: what each call raised, as it is printed.

    Each call has a group of its own, as a timeout breaks one. But torch's cached decisions hold an earlier mesh of the
    same ranks: some calls meet its broken group, and gloo then reports a closed pair instead of the timeout.
    """
    import holdfast.spmd

    holdfast.spmd.enable()
    groups = {name: dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)) for name in CALLS}
    raised = {}
    for name, (make, call, _) in CALLS.items() if dist.get_rank() == 0 else ():
        tensor = make(DeviceMesh.from_group(groups[name], "cpu"))
        try:
            call(tensor)
        except RuntimeError as error:
            raised[name] = "".join(traceback.format_exception_only(error))
    return raised


@pytest.mark.full
def test_the_timeout_of_a_call_that_one_rank_made_alone_names_the_call():
    raised, _ = run_ranks(2, _alone, deadline_s=120)
    for name, (_, _, word) in CALLS.items():
        if name == "set of shards":  # each rank has what it writes
            assert name not in raised
            continue
        assert word in raised.get(name, "nothing was raised"), name
        for said in ("is a collective: every rank of the mesh [0, 1]", "Rank 0 made it"):
            assert said in raised[name], name
        assert raised[name].count("holdfast.spmd:") == 1, name


def _other_error() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    rows = _rows(init_device_mesh("cpu", (2,)))
    found = []
    for call in (lambda: rows[torch.tensor([9])], lambda: rows @ rows[:3]):
        try:
            call()
        except (IndexError, RuntimeError) as error:
            found.append("".join(traceback.format_exception_only(error)))
    return found


def test_other_errors_have_no_such_note():
    for found in run_ranks(2, _other_error, deadline_s=120):
        assert len(found) == 2
        assert not any("is a collective" in words for words in found)


FILLING: dict[str, Any] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(1.0, 2.0),
    "bernoulli_": lambda x: x.bernoulli_(1.0),
}


def _filled() -> dict[str, tuple[int, bool]]:
    import holdfast.spmd

    holdfast.spmd.enable()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for name, fill in FILLING.items():
        tensor = DTensor.from_local(torch.full((4, 4), 7.0), mesh, [Partial()], run_check=False)
        with CommDebugMode() as listening:
            result = fill(tensor)
        whole = result.full_tensor()
        gathered = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(gathered, whole)
        sound = torch.equal(*gathered) and whole.abs().max() < 7 and (name != "uniform_" or whole.min() >= 1)
        found[name] = listening.get_total_counts(), bool(sound)
    return found


def test_a_sum_whose_values_are_not_read_is_not_reduced():
    for found in run_ranks(2, _filled, deadline_s=120):
        assert found == dict.fromkeys(FILLING, (0, True))
