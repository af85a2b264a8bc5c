"""Handlers that mark views stale: installed while a view is alive, on top of the handlers of others."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast.spmd
from holdfast.spmd.base import torch_dispatch
from holdfast.spmd.base.torch_versions import is_torch_2_11
from tests.dist.harness import run_ranks

ADD = torch.ops.aten._foreach_add_.Scalar


def _rows():
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)])


def _after_the_last_view():
    """Whether the handlers are as before while a view is alive, and after the next write without one."""
    holdfast.spmd.enable()
    y, table = _rows(), torch_dispatch.handlers()
    before = dict(table)
    first, second = y[1:3], y[0].conj()
    found = [table == before]
    del first
    torch._foreach_add_([y], 1.0)
    found.append(table == before)
    shown = second.full_tensor().tolist()
    del second
    torch._foreach_add_([y], 1.0)
    return [*found, table == before], shown, y.full_tensor().unique().tolist()


def test_the_first_write_without_a_view_removes_the_handlers():
    assert run_ranks(2, _after_the_last_view, deadline_s=120) == [([False, False, True], [1.0, 1.0], [2.0])] * 2


def _beside_another_library():
    """Let another library handle an operator before the first view, and one replace our handler after it."""
    holdfast.spmd.enable()
    calls, table, y = [], torch_dispatch.handlers(), _rows()

    def earlier(op, args, kwargs):
        calls.append("earlier")
        del table[op]
        try:
            return op(*args, **kwargs)
        finally:
            table[op] = earlier

    table[ADD] = earlier
    row = y[1]
    wrapped = table[torch.ops.aten._foreach_mul_.Scalar]

    def later(op, args, kwargs):
        calls.append("later")
        return wrapped(op, args, kwargs)

    table[torch.ops.aten._foreach_mul_.Scalar] = later
    shown = []
    for write in (torch._foreach_add_, torch._foreach_mul_):
        write([y], 3.0)
        shown.append(row.full_tensor().tolist())
    del row
    torch._foreach_add_([y], 1.0)
    torch._foreach_mul_([y], 2.0)
    holdfast.spmd.disable()
    return shown, calls, table[ADD] is earlier, y.full_tensor().unique().tolist()


def test_the_handlers_of_another_library_are_called_and_stay():
    calls = ["earlier", "later"] * 2
    assert run_ranks(2, _beside_another_library, deadline_s=120) == [([[3.0] * 2, [9.0] * 2], calls, True, [20.0])] * 2


def _kept_references():
    from holdfast.spmd.sharding.live_views import LIVE

    holdfast.spmd.enable()
    y = _rows()
    for _ in range(20):
        y[1:3].unbind(0)
    row = y[1]
    return len(LIVE[y]), row.shape[0]


def test_no_reference_to_a_dead_view_is_kept():
    assert run_ranks(2, _kept_references, deadline_s=120) == [(1, 2)] * 2


def _after_disable():
    holdfast.spmd.enable()
    y = _rows()
    rows = y[1:4]
    holdfast.spmd.disable()
    before = dict(torch_dispatch.handlers())
    row = rows[1]
    torch._foreach_add_([y], 1.0)
    return torch_dispatch.handlers() == before, row.full_tensor().tolist()


def test_a_view_that_is_made_after_disable_installs_no_handler():
    shown = 0.0 if is_torch_2_11() else 1.0  # 2.11 ignores subclasses of DTensor: without the rules no view is live
    assert run_ranks(2, _after_disable, deadline_s=120) == [(True, [shown] * 2)] * 2
