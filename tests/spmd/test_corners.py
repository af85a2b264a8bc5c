"""Calls that the matrix has no row for: each was wrong, or raised, before its rule."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.spmd.base.torch_versions import is_torch_2_11
from tests.dist.harness import run_ranks
from tests.spmd.judge import place as placed


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _parts(tensor: torch.Tensor, mesh: DeviceMesh, how: str) -> DTensor:
    """Every other value is the first rank's, the others the second's: what a rank has not is less, or a share."""
    rank = mesh.get_local_rank()
    own = torch.arange(tensor.numel()).reshape(tensor.shape) % 2 == rank
    shares = {"max": tensor.where(own, tensor - 1), "sum": tensor * 0.5, "avg": tensor + (1 - 2 * rank)}
    return DTensor.from_local(shares[how], mesh, [Partial(how)], run_check=False)


def _differ(found: Any, expected: torch.Tensor) -> bool:
    whole = found.full_tensor()
    return found.shape != expected.shape or whole.shape != expected.shape or not torch.allclose(whole, expected)


RESHAPED = {
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "unsqueeze_ last": lambda x: x.unsqueeze_(-1),
    "squeeze_": lambda x: x.unsqueeze(0).squeeze_(),
    "squeeze_ dim": lambda x: x.unsqueeze(1).squeeze_(1),
    "squeeze_ dims": lambda x: x.unsqueeze(-1).squeeze_((0, -1)),
}


def _reshape(mesh: DeviceMesh) -> list[str]:
    x = _draw(4, 6)
    placed = {
        "R": distribute_tensor(x, mesh, [Replicate()]),
        "0": distribute_tensor(x, mesh, [Shard(0)]),
        "1": distribute_tensor(x, mesh, [Shard(1)]),
        "P": _parts(x, mesh, "sum"),
    }
    wrong = []
    for name, change in RESHAPED.items():
        for place, tensor in placed.items():
            changed, expected = change(tensor.clone()), change(x.clone())
            if _differ(changed, expected) or _differ(changed + 1, expected + 1):
                wrong.append(f"{name} {place}")
    return wrong


PICKED = {
    "gather": lambda x, index, _: x.gather(0, index),
    "scatter": lambda x, index, source: x.scatter(0, index, source),
    "scatter_add": lambda x, index, source: x.scatter_add(0, index, source),
    "scatter_reduce": lambda x, index, source: x.scatter_reduce(0, index, source, "sum"),
    "scatter_add_": lambda x, index, source: x.clone().scatter_add_(0, index, source),
}


def _pick(mesh: DeviceMesh) -> list[str]:
    """The index has two columns, the tensor five: column 1 of each lies on another rank."""
    wrong = []
    x, source = _draw(6, 5), _draw(6, 2, seed=1)
    index = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(seed)) for seed in range(2)], 1)
    for name, pick in PICKED.items():
        for places in ([Shard(1)], [Shard(0)], [Replicate()]):
            leaves = [x.clone().requires_grad_(), source.clone().requires_grad_()]
            placed = [distribute_tensor(leaf.detach(), mesh, [Shard(1)]).requires_grad_() for leaf in leaves]
            expected = pick(leaves[0], index, leaves[1])
            found = pick(placed[0], distribute_tensor(index, mesh, places), placed[1])
            expected.square().sum().backward()
            found.square().sum().backward()
            grads = [(own.grad, leaf.grad) for own, leaf in zip(placed, leaves, strict=True) if leaf.grad is not None]
            if _differ(found.detach(), expected.detach()) or any(_differ(*pair) for pair in grads):
                wrong.append(f"{name} {places}")
    return wrong


WRITTEN = {
    "index_add_": lambda x, index: x.index_add_(1, index, torch.ones_like(x)[:, :3]),
    "index_copy_": lambda x, index: x.index_copy_(0, index, torch.ones_like(x)[:3]),
    "addmv_": lambda x, _: x[:, 0].clone().addmv_(x, x[0]),
}


def _write(mesh: DeviceMesh) -> list[str]:
    """In-place calls for which torch moves the tensor that is written to."""
    wrong = []
    x, index = _draw(4, 6), torch.tensor([3, 0, 2])
    for name, write in WRITTEN.items():
        for dim in (0, 1, None):
            (placed,), (own,) = _placed(mesh, [(x.clone(), dim)]), _placed(mesh, [(index, None)])
            if _differ(write(placed, own), write(x.clone(), index)):
                wrong.append(f"{name} {dim}")
    return wrong


def _turned(mesh: DeviceMesh) -> list[str]:
    """Rows and masks put into a copy of a tensor that lies transposed in memory."""
    wrong = []
    x, rows, mask = _draw(6, 4), torch.tensor([0, 3]), torch.arange(24).reshape(4, 6) % 3 == 0
    for dim in (0, 1):
        (turned,) = _placed(mesh, [(x, 1 - dim)])
        own_rows, own_mask = _placed(mesh, [(rows, None), (mask, None)])
        number = torch.tensor(2.0, dtype=x.dtype)
        pairs = {
            "rows": (turned.t().index_put((own_rows,), number), x.t().index_put((rows,), number)),
            "mask": (turned.t().index_put((own_mask,), number), x.t().index_put((mask,), number)),
        }
        wrong += [f"index_put of {name} {dim}" for name, pair in pairs.items() if _differ(*pair)]
    return wrong


def _others(mesh: DeviceMesh) -> list[str]:
    wrong = []
    x = _draw(4, 6)
    for how in ("max", "avg", "sum"):
        table, ids = _parts(x, mesh, how), torch.tensor([[3, 0], [1, 1]])
        pairs = {
            "threshold": (F.threshold(table, -0.5, 2.0), F.threshold(x, -0.5, 2.0)),
            "embedding": (F.embedding(distribute_tensor(ids, mesh, [Replicate()]), table), F.embedding(ids, x)),
        }
        short = F.embedding(distribute_tensor(ids, mesh, [Replicate()]), _parts(x, mesh, how), max_norm=0.5)
        pairs["max_norm"] = (short, F.embedding(ids, x.clone(), max_norm=0.5))
        wrong += [f"{name} {how}" for name, pair in pairs.items() if _differ(*pair)]
        loss = _parts(x.sum(), mesh, how)
        if f"{loss:.3f}" != f"{x.sum():.3f}":
            wrong.append(f"format {how}")
    first, second = _draw(1, 3), _draw(5, 3, seed=1)
    crossed = torch.linalg.cross(*(distribute_tensor(side, mesh, [Shard(0)]) for side in (first, second)))
    wrong += ["cross"] if _differ(crossed, torch.linalg.cross(first, second)) else []
    image, kernel = _draw(2, 3, 8, 8), _draw(4, 3, 3, 3, seed=1)
    convolved = F.conv2d(*_placed(mesh, [(image, 2), (kernel, None)]), padding="valid")
    wrong += ["conv2d"] if _differ(convolved, F.conv2d(image, kernel, padding="valid")) else []
    sequence = _draw(4, 6, 8)
    for dim in (0, 1, 2, None):
        heads = F.scaled_dot_product_attention(*_placed(mesh, [(sequence, dim)] * 3), is_causal=True)
        if _differ(heads, F.scaled_dot_product_attention(sequence, sequence, sequence, is_causal=True)):
            wrong.append(f"causal attention {dim}")
    return wrong


def _scan(mesh: DeviceMesh) -> list[str]:
    """The gradient of cumprod_, which makes plain tensors; rules that are seen later must not be what helps it."""
    leaf = _draw(5, 4).requires_grad_()
    placed = distribute_tensor(leaf.detach(), mesh, [Replicate()]).requires_grad_()
    for tensor in (leaf, placed):
        tensor.clone().cumprod_(0).square().sum().backward()
    return ["cumprod_"] if _differ(placed.grad, leaf.grad) else []


def _placed(mesh: DeviceMesh, tensors: list[tuple[torch.Tensor, int | None]]) -> list[DTensor]:
    return [
        distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)] * mesh.ndim)
        for tensor, dim in tensors
    ]


def _two_ranks() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    return _scan(mesh) + _reshape(mesh) + _pick(mesh) + _write(mesh) + _turned(mesh) + _others(mesh)


def test_nothing_is_wrong_in_the_corners():
    assert run_ranks(2, _two_ranks, deadline_s=240) == [[], []]


def _grouped_heads() -> list[str]:
    """Two heads of keys for four of queries, on more ranks than there are keys."""
    import holdfast.spmd

    holdfast.spmd.enable()
    wrong = []
    query, key = _draw(2, 4, 5, 8), _draw(2, 2, 6, 8, seed=1)
    expected = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    for shape in ((2, 2), (4,)):
        mesh = init_device_mesh("cpu", shape)
        for dim in (0, 1, 2, None):
            placed = _placed(mesh, [(query, dim), (key, dim), (key, dim)])
            if _differ(F.scaled_dot_product_attention(*placed, enable_gqa=True), expected):
                wrong.append(f"{shape} {dim}")
    return wrong


def test_grouped_heads_over_more_ranks_than_keys():
    assert run_ranks(4, _grouped_heads, deadline_s=240) == [[]] * 4


STRIDED = {
    "amax": lambda x: x.amax(0),
    "amin other": lambda x: x.amin(1),
    "max": lambda x: x.max(),
    "inf norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "sum": lambda x: x.sum(0),
    "group_norm": lambda x: F.group_norm(x, 3),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "rms_norm": lambda x: F.rms_norm(x, (3,)),
    "softmax": lambda x: F.softmax(x, 0),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "cummax": lambda x: x.cummax(0).values,
    "topk": lambda x: x.topk(2, 0).values,
    "argmax": lambda x: x * (x.argmax(0) + 1),
    "rows": lambda x: x[[5, 0, 7]],
    "slice": lambda x: x[1:6],
    "mask": lambda x: x.masked_fill(torch.arange(8)[:, None] % 3 == 0, 2.0),
    "mse": lambda x: F.mse_loss(x, x.detach() * 2),
    "huber": lambda x: F.huber_loss(x, x.detach() * 2, reduction="sum"),
    "cross_entropy": lambda x: F.cross_entropy(x, _like(torch.arange(8) % 3, x)),
    "embedding": lambda x: F.embedding(_like(torch.tensor([7, 1, 1, 4]), x), x),
    "linear": lambda x: F.linear(_like(_draw(2, 3, seed=5), x), x),
    "flip": lambda x: x.flip(0),
    "pad": lambda x: F.pad(x, (0, 0, 1, 2)),
    "var": lambda x: x.var(0),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "clamp": lambda x: x.clamp(-0.1, 0.4),
}


def _like(tensor: torch.Tensor, placed: torch.Tensor) -> torch.Tensor:
    """The same on every rank, where the other is a DTensor."""
    if not isinstance(placed, DTensor):
        return tensor
    mesh = placed.device_mesh
    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)


def _strided() -> list[str]:
    """Rows cut by two axes in the order of FSDP2 beside TP: first by the second axis."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2, 2))
    wrong = []
    x = _draw(8, 3)
    for name, run in STRIDED.items():
        leaf = x.clone().requires_grad_()
        rows = distribute_tensor(x, mesh, [Replicate(), Replicate()])
        rows = rows.redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)]).detach().requires_grad_()
        found, expected = run(rows), run(leaf)
        found.square().sum().backward()
        expected.square().sum().backward()
        if _differ(found.detach(), expected.detach()) or _differ(rows.grad, leaf.grad):
            wrong.append(name)
    rows = distribute_tensor(x[:6], mesh, [Replicate(), Replicate()])
    rows = rows.redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)])
    wrong += ["uneven flatten"] if _differ(rows.flatten(), x[:6].flatten()) else []
    return wrong


@pytest.mark.full
def test_rows_cut_as_fsdp_beside_tp_cuts_them():
    assert run_ranks(4, _strided, deadline_s=240) == [[]] * 4


def _views_of_nothing() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    for before, after in (((4, 0), (4, 2, 0, 0, 0)), ((0, 3), (0, 3, 1, 2)), ((2, 0, 3), (0,)), ((4, 0), (2, 2, 0))):
        for place in (Replicate(), Shard(0), Shard(1), Partial()):
            if isinstance(place, Shard) and place.dim >= len(before):
                continue
            leaf = placed(torch.zeros(before), mesh, (place,)).requires_grad_()
            for name, call in (("view", torch.Tensor.view), ("reshape", torch.reshape)):
                found = call(leaf, after)
                found.sum().backward()
                if tuple(found.shape) != after or tuple(found.full_tensor().shape) != after:
                    wrong.append(f"{name} {before} {after} {place}")
                if leaf.grad is None or tuple(leaf.grad.shape) != before:
                    wrong.append(f"gradient of {name} {before} {after} {place}")
    return wrong


def test_views_of_empty_tensors_end():
    """torch alone looks for the dims of (4, 0) in (4, 2, 0, 0, 0) without end."""
    assert run_ranks(2, _views_of_nothing, deadline_s=60) == [[], []]


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _sequence(rows: int) -> list[str]:
    """Compare a block whose sequence is sharded, with the plan that docs/spmd.md asks for, with one device."""
    import holdfast.spmd

    holdfast.spmd.enable()
    torch.manual_seed(0)
    block, x = _Block().double(), _draw(2, rows, 8)
    expected_loss = block(x).square().sum()
    expected_loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in block.named_parameters()}
    block.zero_grad()
    mesh = init_device_mesh("cpu", (2,))
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    sharded = parallelize_module(block, mesh, plan)
    loss = sharded(distribute_tensor(x, mesh, [Shard(1)])).square().sum()
    loss.backward()
    wrong = [name for name, parameter in sharded.named_parameters() if _differ(parameter.grad, expected[name])]
    return wrong + ["loss"] * _differ(loss, expected_loss)


@pytest.mark.parametrize("rows", [4, 5, 1])
def test_a_sequence_that_does_not_divide_by_the_ranks(rows):
    assert run_ranks(2, _sequence, rows, deadline_s=120) == [[], []]


def _empty_shard() -> list[str]:
    """Return the calls that are wrong, or raise, where the second rank has no rows."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole = init_device_mesh("cpu", (2,)), torch.tensor([[1, 2, 3]])
    x, wrong = distribute_tensor(whole, mesh, [Shard(0)]), []
    number = torch.tensor(2)
    calls = {"fmax": torch.fmax, "gcd": torch.gcd, "left_shift": torch.bitwise_left_shift, "<<": lambda a, b: a << b}
    for name, call in calls.items():
        if _differ(call(number, x), call(number, whole)):
            wrong.append(name)
    values, row = whole.double(), torch.zeros(3, dtype=torch.float64)
    x, out = distribute_tensor(values, mesh, [Shard(0)]), distribute_tensor(row, mesh, [Replicate()])
    for reduce in (torch.amax, torch.amin, torch.sum, torch.mean, torch.prod, torch.logsumexp):
        reduce(x, 0, out=out)
        if _differ(out, reduce(values, 0)):
            wrong.append(f"{reduce.__name__} out=")
    return wrong


def test_a_plain_number_or_out_beside_an_empty_shard():
    assert run_ranks(2, _empty_shard, deadline_s=60) == [[], []]


def _moved_gradients() -> list[str]:
    """Return the fused steps that differ from one device where a gradient has other placements than its parameter."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    optimizers = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    for shape in ((5, 7), (8, 3), (4, 6)):
        for here, there in (
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
            (Shard(1), Replicate()),
            (Replicate(), Shard(0)),
        ):
            for optimizer in optimizers:
                value, gradient = _draw(*shape), _draw(*shape, seed=1)
                one = torch.nn.Parameter(value.clone())
                own = torch.nn.Parameter(distribute_tensor(value.clone(), mesh, [here]))
                one.grad, own.grad = gradient, distribute_tensor(gradient, mesh, [there])
                for parameter in (one, own):
                    optimizer([parameter], lr=0.1, fused=True).step()
                if _differ(own.detach(), one.detach()):
                    wrong.append(f"{optimizer.__name__} {shape} {here} {there}")
    return wrong


def test_fused_steps_with_gradients_placed_otherwise_than_parameters():
    assert run_ranks(2, _moved_gradients, deadline_s=60) == [[], []]


def _fused_states() -> list[str]:
    """Return the fused Adam steps that leave a tensor other than one device does, with a state or gradient apart."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False}
    names = ("parameter", "gradient", "average", "square")
    for apart in range(1, 4):
        for here, there in ((Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Shard(0))):
            for scale in (None, torch.tensor(4.0)):
                whole = [_draw(5, 4, seed=seed).abs() for seed in range(4)]
                places = [there if number == apart else here for number in range(4)]
                own = [distribute_tensor(t.clone(), mesh, [place]) for t, place in zip(whole, places, strict=True)]
                for tensors in (whole, own):
                    lists = [[tensor] for tensor in tensors]
                    step = [torch.tensor(1.0)]
                    torch._fused_adamw_(*lists, [], step, **options, maximize=False, grad_scale=scale)
                for name, found, expected in zip(names, own, whole, strict=True):
                    if _differ(found, expected):
                        wrong.append(f"{name}, {names[apart]} as {there}, others as {here}, scale {scale}")
    return wrong


def test_fused_steps_with_states_placed_otherwise_than_parameters():
    assert run_ranks(2, _fused_states, deadline_s=60) == [[], []]


COMPARED = {
    **(
        {}
        if is_torch_2_11()  # which has no derivative of aminmax
        else {
            "aminmax": lambda x, y, rows: torch.aminmax(x).max,
            "aminmax dim": lambda x, y, rows: torch.aminmax(x, dim=0).max,
        }
    ),
    "scatter_reduce": lambda x, y, rows: x.scatter_reduce(0, rows[:, None].expand(4, 3), y, "amax"),
    "scatter_reduce dim 1": lambda x, y, rows: x.scatter_reduce(1, rows[:, None].expand(4, 3), y, "amin"),
    "index_reduce": lambda x, y, rows: x.index_reduce(0, rows, y, "amin"),
    "dist": lambda x, y, rows: torch.dist(x, y, float("inf")),
    "amax": lambda x, y, rows: x.amax(0),
    "vector_norm": lambda x, y, rows: torch.linalg.vector_norm(x, float("inf")),
}


def _compared() -> list[str]:
    """Return the operators whose gradient compares a Partial with the result and differs from one device's."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (3,)), []
    rows = torch.tensor([0, 1, 0, 2])
    for name, call in COMPARED.items():
        for seed in range(10):  # the rounding of a sum over three ranks depends on their order
            x, y = _draw(4, 3, seed=seed), _draw(4, 3, seed=seed + 100)
            partial = DTensor.from_local(x * (mesh.get_local_rank() + 1) / 6, mesh, [Partial()]).requires_grad_()
            whole = partial.full_tensor().detach().clone().requires_grad_()
            others = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (y, rows)]
            call(partial, *others).sum().backward()
            call(whole, y, rows).sum().backward()
            if _differ(partial.grad, whole.grad):
                wrong.append(f"{name}, seed {seed}")
    return wrong


def test_gradients_that_compare_a_partial_with_the_result():
    assert run_ranks(3, _compared, deadline_s=120) == [[]] * 3


def _root(x: Any) -> Any:
    return torch.linalg.vector_norm(x, dim=0)


def _add_in_place(x: Any) -> Any:
    y = _root(x).clone()
    y += y
    return y - 1


NORMED = {
    "sum": lambda x: _root(x).sum(),
    "sum of squares": lambda x: _root(x).sum().square(),
    "nansum": lambda x: _root(x).nansum(),
    "einsum": lambda x: torch.einsum("i->", _root(x)),
    "repeat": lambda x: _root(x).repeat(2).sum(),
    "stack": lambda x: torch.stack([x.norm(), -x.norm()]),
    "stack of norms": lambda x: torch.stack([x.norm(), (2 * x).norm()]).norm(),
    "cat": lambda x: torch.cat([_root(x), -x[0]]),
    "another order": lambda x: _root(x).norm(1),
    "view": lambda x: x.norm().view(1),
    "reshape": lambda x: _root(x).reshape(1, -1),
    "outer": lambda x: torch.outer(_root(x), _root(x)),
    "write": _add_in_place,
    "weight_norm": lambda x: torch._weight_norm(x, x[:, :1], 0),
    "weight_norm 1": lambda x: torch._weight_norm(x, x[:1], 1),
}


def _norms() -> list[str]:
    """Return the uses of norms whose value or gradient differs from one device's."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    for name, call in NORMED.items():
        for place in (Shard(0), Shard(1), Replicate()):
            whole = _draw(5, 3).requires_grad_()
            own = distribute_tensor(whole.detach(), mesh, [place]).requires_grad_()
            expected, found = call(whole), call(own)
            expected.sum().backward()
            found.sum().backward()
            if _differ(found.detach(), expected.detach()) or _differ(own.grad, whole.grad):
                wrong.append(f"{name} {place}")
    return wrong


def test_norms_that_are_used_before_they_are_reduced():
    assert run_ranks(2, _norms, deadline_s=120) == [[], []]


VIEWS = {
    "view": lambda norms: norms.view(2, 3),
    "slice": lambda norms: norms[1:3],
    "row": lambda norms: norms[4],
    "detach": lambda norms: norms.detach(),
    "split": lambda norms: norms.split(4)[1],
}
WRITES = {"double": lambda x: x.mul_(2), "add": lambda x: x.add_(1), "negate": lambda x: x.neg_()}


def _written_norms() -> list[str]:
    """Return the writes into a norm, or a view of it, that the norm or its other views do not show."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, whole, wrong = init_device_mesh("cpu", (2, 2)), _draw(4, 5, 6), []
    own = {places: distribute_tensor(whole, mesh, places) for places in ((Shard(0), Replicate()), (Shard(1), Shard(2)))}
    for places, name, write in itertools.product(own, VIEWS, WRITES):
        for writes_view in (False, True):
            shown = []
            for x in (whole, own[places]):
                norms = torch.linalg.vector_norm(x, dim=(0, 1))
                views = [view(norms) for view in VIEWS.values()]
                WRITES[write](VIEWS[name](norms) if writes_view else norms)
                shown.append([norms, *views])
            if any(_differ(found, expected) for expected, found in zip(*shown, strict=True)):
                wrong.append(f"{write} {name} {places} {writes_view}")
    return wrong


def test_writes_into_norms_and_their_views():
    assert run_ranks(4, _written_norms, deadline_s=120) == [[]] * 4


def _mixed_weight_norm() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong, places = init_device_mesh("cpu", (2,)), [], (Shard(0), Shard(1), Replicate(), Partial())
    v, lengths = _draw(4, 3), {0: _draw(4, 1, seed=1), 1: _draw(1, 3, seed=1)}
    for dim, g in lengths.items():
        for here in places:
            for there in places:
                own = [placed(tensor, mesh, [place]) for tensor, place in ((v, here), (g, there))]
                if _differ(torch._weight_norm(*own, dim), torch._weight_norm(v, g, dim)):
                    wrong.append(f"dim {dim}, {here}, {there}")
    return wrong


def test_weight_norm_of_tensors_placed_differently():
    assert run_ranks(2, _mixed_weight_norm, deadline_s=60) == [[], []]


def _scaled(place: Any) -> list[Any]:
    """Return the scales and parameters after three steps, the second of which overflows in one element."""
    first, second = torch.nn.Parameter(place(torch.ones(4), 0)), torch.nn.Parameter(place(torch.ones(4, 4), 1))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100), []
    for step in range(3):
        optimizer.zero_grad()
        factor = torch.ones(4, 4)
        factor[3, 3] = 3e38 if step == 1 else 1.0  # times the scale: inf
        for loss in ((second * place(factor, 1)).sum(), (first * first).sum()):
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [scales, *(p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in (first, second))]


def _overflows() -> list[str]:
    """Return the placements with which a rank misses an overflow in another rank's shard."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    both = [Shard(0), Shard(1)]
    layouts = {
        "replicas first": ((mesh, [Replicate(), Replicate()]), (mesh, both)),
        "rows first": ((mesh, [Shard(0), Replicate()]), (mesh, both)),
        "another mesh first": ((mesh["dp"], [Shard(0)]), (mesh, both)),
        "one axis": ((mesh["tp"], [Replicate()]), (mesh["tp"], [Shard(0)])),
        "a plain one first": (None, (mesh, both)),
    }
    expected, wrong = _scaled(lambda tensor, which: tensor), []
    for name, layout in layouts.items():

        def place(tensor: torch.Tensor, which: int, layout: Any = layout) -> torch.Tensor:
            return tensor if layout[which] is None else distribute_tensor(tensor, *layout[which])

        found = _scaled(place)
        if found[0] != expected[0] or not all(map(torch.equal, found[1:], expected[1:])):
            wrong.append(f"{name}: {found[0]}")
    return wrong


def test_an_overflow_in_one_shard_is_seen_by_every_rank():
    assert run_ranks(4, _overflows, deadline_s=120) == [[]] * 4


def _maxima() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (2,)), []
    tensors = [_draw(5, 2), torch.tensor([[3.0, 4.0]]), _draw(4, 2, seed=1).flip(0)]
    for order in itertools.permutations(range(3)):
        whole = [tensors[index] for index in order]
        found = torch._foreach_max([distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole])
        if any(_differ(*pair) for pair in zip(found, torch._foreach_max(whole), strict=True)):
            wrong.append(f"{order}")
    return wrong


def test_an_empty_shard_in_a_list_affects_no_other_tensor():
    assert run_ranks(2, _maxima, deadline_s=60) == [[], []]


def _undivided_columns() -> str:
    """Return the error of a plan whose columns do not divide by the ranks, and whose layers exchange plain tensors."""
    import holdfast.spmd

    holdfast.spmd.enable()
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    with pytest.raises(RuntimeError) as raised:
        parallelize_module(layers, init_device_mesh("cpu", (2,)), plan)(torch.ones(4, 5))
    return str(raised.value)


def test_sizes_that_do_not_match_raise_before_anything_is_sent():
    assert all("same reduction dim" in error for error in run_ranks(2, _undivided_columns, deadline_s=60))
