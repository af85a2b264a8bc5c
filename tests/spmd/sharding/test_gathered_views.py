"""Views that had to be gathered still behave as views."""

from __future__ import annotations

import copy
import io
import pickle

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map

from holdfast.spmd.base.torch_versions import is_torch_2_11
from tests.dist.harness import run_ranks


def _pair():
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(6, 4)
    return distribute_tensor(whole.clone(), mesh, [Shard(0)]), whole


def _both(act):
    """The same actions on a DTensor and on one device; whether they leave the same."""
    placed, whole = _pair()
    seen, expected = act(placed), act(whole)
    seen = seen.full_tensor() if isinstance(seen, DTensor) else seen
    return torch.equal(placed.full_tensor(), whole) and torch.equal(seen, expected)


def _sees_later_writes(y):
    rows = y[1:4]
    y.mul_(2.0)
    return rows + 0


def _writes_through_two_views(y):
    y[1:5][::2].add_(100.0)
    return y[1:5] + 0


def _two_views_of_one_tensor(y):
    first, second = y[0:4], y[2:6]
    first.zero_()
    second.add_(1.0)
    return first + second


def _unbound_rows(y):
    rows = torch.unbind(y, 0)
    rows[1].mul_(5.0)
    rows[5].zero_()
    return rows[1] + 0


def _turned_then_sliced(y):
    y.t()[:, 2:5].fill_(-1.0)
    return y.t() + 0


def _assigned_and_read_back(y):
    y[-2:] = y[:2] * 10
    y[::3] = 7.0
    y[4, 1:3] = torch.tensor([1.0, 2.0])
    return y[3:] + 0


def _gathered_after_a_write(y):
    rows = y[1:4]
    y.mul_(2.0)
    return rows.full_tensor() if isinstance(rows, DTensor) else rows.clone()


def _written_in_a_list(y):
    torch._foreach_mul_([y[1:4], y[5:6]], 2.0)
    return y[1:4] + 0


def _written_as_a_result(y):
    torch.add(y[0:2], 1.0, out=y[2:4])
    return y[3] + 0


def _unbound_rows_of_a_slice(y):
    y[1:5].unbind(0)[2].mul_(3.0)
    return y[3] + 0


def _where_torch_counts_no_writes(y):
    with torch.inference_mode():
        z = y * 1
        rows = z[1:4]
        z.mul_(2.0)
        rows.add_(1.0)
        return (z + rows.sum()).clone()


def _stepped(**options):
    def stepped(y):
        leaf = torch.nn.Parameter(y.detach())  # the same memory
        leaf.grad = torch.ones_like(leaf)
        row, rows = leaf.detach()[1], y[3:5]
        torch.optim.AdamW([leaf], lr=0.5, **options).step()
        return row + rows

    return stepped


def _stepped_in_lists(y):
    return _stepped(foreach=True)(y)


def _stepped_at_once(y):
    return _stepped(fused=True)(y)


def _averaged_in_lists(y):
    row = y[1]
    torch._foreach_lerp_([y], [y * 3], 0.5)
    return row + 0


def _turned_off_and_on(y):
    import holdfast.spmd

    _ = y[0] + 0
    holdfast.spmd.disable()
    holdfast.spmd.enable()
    row = y[1]
    torch._foreach_add_([y, y * 1], 1.0)
    return row + 0


def _unscaled(y):
    leaf = torch.nn.Parameter(torch.zeros_like(y))
    leaf.grad = y
    rows, scaler = y[1:3], torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD([leaf]))
    return rows + 0


def _kept_while_turned_on_again(y):
    import holdfast.spmd

    row = y[1]
    holdfast.spmd.enable()
    torch._foreach_add_([y], 1.0)
    return row + 0


def _kept_while_turned_off(y):
    import holdfast.spmd

    read, unread = y[1], y[3:5]
    holdfast.spmd.disable()
    _ = read + 0
    torch._foreach_add_([y], 1.0)
    meanwhile = read + 0
    torch._foreach_add_([y], 1.0)
    holdfast.spmd.enable()
    return meanwhile + read + unread


ACTS = (
    *(_unscaled, _kept_while_turned_on_again),
    *(() if is_torch_2_11() else (_kept_while_turned_off,)),  # without the rules it ignores subclasses of DTensor
    *(_stepped_in_lists, _stepped_at_once, _averaged_in_lists, _turned_off_and_on),
    *(_sees_later_writes, _writes_through_two_views, _two_views_of_one_tensor),
    *(_unbound_rows, _turned_then_sliced, _assigned_and_read_back, _gathered_after_a_write),
    *(_written_in_a_list, _written_as_a_result, _unbound_rows_of_a_slice, _where_torch_counts_no_writes),
)


def _all():
    return {act.__name__: _both(act) for act in ACTS}


def test_views_of_sharded_dims_are_views():
    for found in run_ranks(2, _all, deadline_s=120):
        assert found == {act.__name__: True for act in ACTS}


def _first_then_second(y):
    first, second = y[0:4], y[2:6]
    first.mul_(3.0)
    return first, second


def _second_then_a_view_of_it(y):
    first, second = y[0:4], y[2:6]
    second[0].fill_(5.0)
    return first, second


def _both_in_a_list(y):
    first, second = y[0:2], y[1:6]
    torch._foreach_add_([y[0:1], y[5:6]], 2.0)
    return first, second


def _a_row_of_many(y):
    rows = y.unbind(0)
    rows[2].zero_()
    return rows[2], y[1:4]


def _without_a_count(y):
    first, second = y[0:4], y[2:6]
    first.data.mul_(3.0)
    return first, second


BESIDE = (_first_then_second, _second_then_a_view_of_it, _both_in_a_list, _a_row_of_many, _without_a_count)


def _shows(view, expected):
    """Whether this rank's part of a view is that of the view on one device."""
    local = view.to_local()
    return torch.equal(local, expected.chunk(2)[dist.get_rank()] if view.placements == (Shard(0),) else expected)


def _read_by_one_rank():
    """Rank 0 alone reads views that were written through a view; then every rank reads them after another write."""
    found = {}
    for act in BESIDE:
        placed, whole = _pair()
        expected, seen = act(whole), act(placed)
        with CommDebugMode() as listening:
            right = [dist.get_rank() == 1 or _shows(*pair) for pair in zip(seen, expected, strict=True)]
        placed.add_(1.0)
        whole.add_(1.0)
        right += [_shows(*pair) for pair in zip(seen, expected, strict=True)]
        right.append(torch.equal(placed.full_tensor(), whole))
        found[act.__name__] = listening.get_total_counts(), right
    return found


def test_one_rank_alone_can_read_views_that_were_written_through_a_view():
    for found in run_ranks(2, _read_by_one_rank, deadline_s=120):
        assert found == {act.__name__: (0, [True] * 5) for act in BESIDE}


def _gradients():
    placed, whole = _pair()
    results = []
    for tensor in (placed, whole):
        leaf = tensor.detach().clone().requires_grad_()
        copy = leaf * 1
        copy[1:4].mul_(3.0)
        copy[0] = copy[5] * 2
        (copy * copy).sum().backward()
        results.append(leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad)
    return torch.allclose(*results)


def test_gradients_pass_through_what_was_written():
    assert run_ranks(2, _gradients, deadline_s=120) == [True, True]


def _into_partial():
    """Writing into a view of a Partial: the tensor that was viewed is reduced, and has what was written."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    found = []
    for write in (lambda y: y[::2].add_(1.0), lambda y: y.t()[0].fill_(3.0), lambda y: y.view(-1)[2:5].mul_(y[0, 1])):
        whole = torch.arange(1.0, 9.0).reshape(4, 2)
        share = 0.25 if torch.distributed.get_rank() else 0.75
        placed = DTensor.from_local(whole * share, mesh, [Partial()], run_check=False)
        write(whole)
        write(placed)
        found.append(torch.allclose(placed.full_tensor(), whole))
    return found


def test_a_view_of_a_partial_writes_through():
    assert run_ranks(2, _into_partial, deadline_s=120) == [[True] * 3] * 2


def _saved():
    """Save, pickle and copy a view: each gives the rows, and no longer writes through."""
    placed, whole = _pair()
    view, file = placed[2:5], io.BytesIO()
    torch.save({"rows": view}, file)
    file.seek(0)
    found = [torch.load(file, weights_only=False)["rows"], pickle.loads(pickle.dumps(view)), copy.deepcopy(view)]
    placed.zero_()
    return [type(rows) is DTensor and torch.equal(rows.full_tensor(), whole[2:5]) for rows in found]


def test_a_saved_view_is_its_rows():
    assert run_ranks(2, _saved, deadline_s=120) == [[True] * 3] * 2


def _placements_before_and_after():
    """Read placements, then the contents that they speak of, as local_map does; after writes too."""
    found = []
    for act in (lambda y: None, lambda y: y.mul_(3.0), lambda y: y[2].zero_()):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                placed, whole = _pair()
                view, expected = placed[1:5], whole[1:5]
                act(placed)
                act(whole)
                places = view.placements
                again = DTensor.from_local(view.to_local(), view.device_mesh, places)
                total = local_map(
                    lambda rows: rows.sum(),
                    out_placements=[Partial()],
                    in_placements=([Shard(0)],),
                    redistribute_inputs=True,
                    device_mesh=view.device_mesh,
                )(view)
                found.append(view.placements == places == (Shard(0),))
                found.append(torch.equal(again.full_tensor(), expected))
                found.append(total.full_tensor().item() == expected.sum().item())
    return found


def test_a_view_keeps_its_placements_when_it_is_fetched_again():
    assert run_ranks(2, _placements_before_and_after, deadline_s=120) == [[True] * 18] * 2


def _conjugates():
    """Views of a lazy conjugate, fetched again after a write."""
    import holdfast.spmd

    holdfast.spmd.enable()
    whole = torch.complex(torch.arange(12.0), torch.arange(12.0) + 0.5).view(6, 2)
    placed = distribute_tensor(whole.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
    found = []
    for view in (lambda y: y.conj().imag, lambda y: y.conj()[1:3], lambda y: y[1:4].conj().real):
        seen, expected = view(placed), view(whole)
        placed.mul_(2.0)
        whole.mul_(2.0)
        found.append(torch.equal(seen.full_tensor(), expected.resolve_conj().resolve_neg()))
    return found


def test_views_of_a_conjugate_see_later_writes():
    assert run_ranks(2, _conjugates, deadline_s=120) == [[True] * 3] * 2
