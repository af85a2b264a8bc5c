"""torch's LocalTensorMode, which runs every rank in one process: rules run, or leave the call to torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import holdfast.spmd

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    holdfast.spmd.enable()
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    right = {
        "logsumexp": lambda t: t.logsumexp(0),
        "softmax": lambda t: t.softmax(0),
        "cumsum": lambda t: t.cumsum(-2),
        "mse_loss": lambda t: F.mse_loss(t, t * 2),
        "slice": lambda t: t[2:6],
        "index": lambda t: t[torch.tensor([3, 1, 6])],
        "index_select": lambda t: t.index_select(0, torch.tensor([3, 1, 6])),
        "gather": lambda t: t.gather(0, torch.tensor([[3, 1, 6, 0, 0, 2]])),
        "index_add": lambda t: t.index_add(0, torch.tensor([3, 1]), torch.ones(2, 6)),
    }
    edits = {  # of a Partial
        "fill_": lambda t: t.fill_(8.0),
        "add_": lambda t: t.add_(1.0),
        "clamp_": lambda t: t.clamp_(0.0, 0.5),
        "masked_fill_": lambda t: t.masked_fill_(torch.arange(6) % 2 == 0, 3.0),
    }
    drawn = {
        "dropout": lambda t: F.dropout(t, 0.5),
        "rand_like": torch.rand_like,
        "normal_": lambda t: t.clone().normal_(),
    }
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (4,))
        placed = distribute_tensor(whole, mesh, [Shard(0)])
        for name, call in right.items():
            found = call(placed).full_tensor().reconcile()
            assert torch.allclose(found, call(whole), atol=1e-6), name
        for name, edit in edits.items():
            parts = LocalTensor({rank: whole * (rank + 1) / 10 for rank in range(4)})
            part = DTensor.from_local(parts, mesh, [Partial()], run_check=False)
            expected = whole.clone()
            edit(part), edit(expected)
            assert torch.allclose(part.full_tensor().reconcile(), expected, atol=1e-6), name
        for name, call in drawn.items():
            assert call(placed).shape == whole.shape, name
        few, row = distribute_tensor(whole[:5], mesh, [Shard(0)]).requires_grad_(), whole[:5].clone().requires_grad_()
        for rows in (few, row):  # the last of four ranks has none
            (F.layer_norm(rows, (6,)) * rows).sum().backward()
        assert torch.allclose(few.grad.full_tensor().reconcile(), row.grad, atol=1e-6)
        try:
            placed.clone()[1:3] = 5.0
        except holdfast.spmd.SpmdError as error:
            assert "LocalTensorMode" in str(error)
        else:
            raise AssertionError("rows were written into a copy")
    print("as one device")
"""


def test_rules_run_for_all_ranks_at_once():
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.strip() == "as one device", ran.stderr
