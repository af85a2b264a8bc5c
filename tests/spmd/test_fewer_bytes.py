"""Calls that send nothing, or a result only, where each rank's part is enough."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from holdfast.spmd.base.torch_versions import AT_LEAST_2_13
from tests.dist.harness import run_ranks
from tests.spmd.listening import Listener

WORLD = 4
ROWS, COLUMNS = 10, 7


def _listen(call):
    """The result, and the number of elements that collectives were given."""
    with CommDebugMode() as listening:
        result = call()
    return result, listening.get_total_counts()


def _partials(mesh):
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(WORLD, ROWS, COLUMNS, generator=generator, dtype=torch.float64)
    reduced = {"max": parts.amax(0), "min": parts.amin(0), "avg": parts.mean(0)}
    own = parts[mesh.get_rank()]
    return {
        how: (DTensor.from_local(own.clone(), mesh, [Partial(how)], run_check=False), whole)
        for how, whole in reduced.items()
    }


def _check():
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (WORLD,))
    wrong = []

    def judge(name, found, expected, sent, allowed):
        whole = found.full_tensor() if isinstance(found, DTensor) else found
        if not torch.allclose(whole, expected) or sent > allowed:
            wrong.append((name, sent))

    for how, (part, whole) in _partials(mesh).items():
        for name, call in {
            "max": lambda t: t.max(),
            "amin": lambda t: t.amin(0),
            "amax": lambda t: t.amax((0, 1), keepdim=True),
        }.items():
            found, sent = _listen(lambda c=call, p=part: c(p))
            judge(f"{name} of Partial({how})", found, call(whole), sent, 1)
    average, whole = _partials(mesh)["avg"]
    ones = distribute_tensor(torch.ones_like(whole), mesh, [Replicate()])
    found, sent = _listen(lambda: average.add_(ones).sub_(0.5))
    judge("add_ to an average", found, whole + 0.5, sent, 0)
    judge("the average itself", average, whole + 0.5, 0, 0)
    _put_parts(mesh, judge)
    for places in (Shard(0), Replicate()), (Shard(1), Shard(1)), (Replicate(), Shard(0)):
        _bilinear(mesh, places, judge)
    ordered = torch.randn(6, 9, generator=torch.Generator().manual_seed(2)).sort().values
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(3))
    for sequence, here, there in (
        (ordered[0], Replicate(), Shard(0)),
        (ordered, Shard(0), Shard(0)),
        (ordered, Replicate(), Shard(1)),
    ):
        given = distribute_tensor(sequence, mesh, [here]), distribute_tensor(values, mesh, [there])
        found, sent = _listen(lambda g=given: torch.searchsorted(*g, right=True))
        judge(f"searchsorted {here} {there}", found, torch.searchsorted(sequence, values, right=True), sent, 0)
    scalar, target = (distribute_tensor(torch.tensor(item), mesh, [Replicate()]) for item in (0.5, 0))
    judge("multi_margin_loss of a number", F.multi_margin_loss(scalar, target), torch.tensor(0.0), 0, 0)
    return wrong


def _put_parts(mesh, judge):
    """x[i] = v and x[mask] = v of two Partials alike: each rank's part is enough, but for an element written twice."""
    for how, (part, whole) in _partials(mesh).items():
        row = DTensor.from_local(part.to_local()[0].exp(), mesh, [Partial(how)], run_check=False)
        filled = row.full_tensor()
        mask = torch.arange(COLUMNS) % 2 == 0
        for name, keys, value, given, allowed in (
            ("row", [torch.tensor(3)], row, filled, 0),
            ("element", [torch.tensor([-1]), torch.tensor(2)], row[:1], filled[:1], 0),
            ("mask", [None, mask], row[:4], filled[:4], 0),
            ("row twice", [torch.tensor([3, 3])], row, filled, 2),
        ):
            expected = torch.ops.aten.index_put.default(whole, keys, given)
            found, sent = _listen(lambda p=part, k=keys, v=value: torch.ops.aten.index_put.default(p, k, v))
            judge(f"index_put {name} of Partial({how})", found, expected, sent, allowed)
            copy = DTensor.from_local(part.to_local().clone(), mesh, [Partial(how)], run_check=False)
            found, sent = _listen(lambda c=copy, k=keys, v=value: torch.ops.aten.index_put_.default(c, k, v))
            judge(f"index_put_ {name} of Partial({how})", copy, expected, sent, allowed)


def _bilinear(mesh, places, judge):
    generator = torch.Generator().manual_seed(4)
    shapes = ((6, 3), (6, 4), (5, 3, 4))
    wholes = [torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    first, weight = places
    second = Replicate() if first == Shard(1) else first
    placed = [
        distribute_tensor(whole.detach(), mesh, [place]).requires_grad_()
        for whole, place in zip(wholes, (first, second, weight), strict=True)
    ]
    expected = F.bilinear(*wholes)
    found, sent = _listen(lambda: F.bilinear(*placed))
    judge(f"bilinear {places}", found, expected, sent, 0)
    (expected * expected).sum().backward()
    (found * found).sum().backward()
    for name, ours, theirs in zip("abw", placed, wholes, strict=True):
        judge(f"gradient {name} of bilinear {places}", ours.grad, theirs.grad, 0, 0)


def test_nothing_is_sent_that_every_rank_has():
    assert run_ranks(WORLD, _check, deadline_s=120) == [[]] * WORLD


def _bytes_of(call):
    """The bytes that this rank receives, forward and backward."""
    with Listener(WORLD) as listening:
        result = call()
        (result * result).mean().backward()
    return listening.bytes


CHAIN_ROWS, HIDDEN = 64, 16
NORMS = {
    "layer_norm": lambda x, *affine: F.layer_norm(x, (HIDDEN,)),
    "softmax": lambda x, *affine: x.softmax(-1),
    "group_norm": lambda x, *affine: F.group_norm(x, 4, *affine),
    "rms_norm": lambda x, *affine: F.rms_norm(x, (HIDDEN,)),
    "gelu": lambda x, *affine: F.gelu(x),
    "none": lambda x, *affine: x,
}

RAISE = (("group_norm", "S(0)"), ("group_norm", "S(1)"), ("rms_norm", "S(1)"))  # with torch alone


def _chains():
    """Bytes of a call before a column-wise linear, with torch alone and with the rules, by call and placement."""
    import holdfast.spmd

    mesh = init_device_mesh("cpu", (WORLD,))
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(CHAIN_ROWS, HIDDEN, generator=generator)
    columns = torch.randn(4 * HIDDEN, HIDDEN, generator=generator)
    found: dict[tuple[str, str], list[int]] = {}
    for turn in (holdfast.spmd.disable, holdfast.spmd.enable):
        turn()
        for name, norm in NORMS.items():
            for place in (Replicate(), Shard(0), Shard(1)):
                x = distribute_tensor(rows, mesh, [place]).requires_grad_()
                weight = distribute_tensor(columns, mesh, [Shard(0)]).requires_grad_()
                ones = distribute_tensor(torch.ones(HIDDEN), mesh, [Replicate()])
                affine = [ones.clone().requires_grad_() for _ in range(2)]
                if (name, str(place)) in RAISE:
                    continue
                call = _bytes_of(lambda n=norm, given=(x, *affine), w=weight: F.linear(n(*given), w))
                found.setdefault((name, str(place)), []).append(call)
    return found


@pytest.mark.full
@pytest.mark.skipif(not AT_LEAST_2_13, reason="before 2.13 torch alone has no group_norm to compare with")
def test_a_column_wise_linear_after_a_norm_moves_no_more_than_the_norms_own_numbers():
    """Sharded rows stay sharded through layer_norm and softmax, for a few numbers a row; the linear gathers them."""
    number = 4 * CHAIN_ROWS * 2 * (WORLD - 1) // WORLD  # one for each row, reduced
    allowed = {("layer_norm", "S(1)"): 4 * number, ("softmax", "S(1)"): 3 * number}
    for found in run_ranks(WORLD, _chains, deadline_s=180):
        assert len(found) == len(NORMS) * 3 - len(RAISE)
        more = {chain: ours - theirs for chain, (theirs, ours) in found.items() if ours > theirs}
        assert more == allowed
