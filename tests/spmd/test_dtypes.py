"""Integers, complex numbers and mixed kinds of Partial: calls that hung, raised or were wrong on some ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tests.dist.harness import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _place(tensor: torch.Tensor, mesh: DeviceMesh, place: Placement) -> DTensor:
    """A tensor that every rank has, placed; of a Partial each rank has another part."""
    if isinstance(place, Partial):
        rank, ranks = mesh.get_local_rank(), mesh.size()
        shares = {"sum": tensor * (rank + 1) * 2 / (ranks * (ranks + 1)), "max": tensor - rank, "min": tensor + rank}
        shares["avg"] = tensor + rank - (ranks - 1) / 2
        shares["product"] = torch.ones_like(tensor) if rank else tensor
        return DTensor.from_local(shares[place.reduce_op], mesh, [place], run_check=False)
    return DTensor.from_local(tensor.clone(), mesh, [R], run_check=False).redistribute(placements=[place]).detach()


def _differs(found: Any, expected: Any) -> bool:
    if isinstance(expected, (list, tuple)):
        return any(_differs(*pair) for pair in zip(found, expected, strict=True))
    whole = found.full_tensor()
    return found.shape != expected.shape or whole.dtype != expected.dtype or not torch.allclose(whole, expected)


Case = tuple[str, Callable[..., Any], list[torch.Tensor], list[list[Placement]]]


def _integers() -> list[Case]:
    number, rows, column = torch.tensor(3), torch.arange(50).reshape(5, 10), torch.arange(10)
    batch = column.reshape(1, 10, 1)
    return [
        ("addmv", torch.addmv, [number, rows, column], [[R, S0, S0], [R, R, S0], [R, S1, R], [R, S0, R]]),
        ("addmv float", torch.addmv, [number * 1.5, rows * 1.0, column * 1.0], [[R, R, S0], [R, S0, R]]),
        ("baddbmm", torch.baddbmm, [number, rows[None], batch], [[R, Shard(2), S1], [R, R, S1], [R, S1, R]]),
        ("linear", F.linear, [rows, rows[:2], torch.arange(2)], [[R, S1, R], [S1, R, R], [S0, S0, S0]]),
    ]


def _shapes() -> list[Case]:
    x = _draw(5, 1, 5, 1)
    places: list[list[Placement]] = [[R], [S0], [S1], [Shard(2)], [Shard(3)], [Partial()]]
    return [
        ("squeeze_copy", torch.squeeze_copy, [x], places),
        ("squeeze_copy dim", lambda x: torch.squeeze_copy(x, 2), [x], places),
        ("squeeze_copy dims", lambda x: torch.squeeze_copy(x, (1, 2)), [x], places),
    ]


def _norms() -> list[Case]:
    """Beside batch_norm's usual kernel: one channel, or five, for four ranks."""

    def updated(*tensors: torch.Tensor) -> Any:
        out = torch.ops.aten._batch_norm_with_update(*tensors, 0.1, 1e-5)[:3]
        return [*out, tensors[3], tensors[4]]

    cases: list[Case] = []
    for channels in (1, 5):
        tensors = [_draw(4, channels, 5), *(_draw(channels, seed=seed).abs() + 1 for seed in range(1, 5))]
        places: list[list[Placement]] = [[x, w, w, r, r] for x in (R, S0, S1) for w in (R, S0) for r in (R, S0)]
        cases.append((f"batch_norm_with_update {channels}", updated, tensors, places))
    return cases


def _partials() -> list[Case]:
    x, y = _draw(4, 3), _draw(4, 3, seed=1)
    kinds = [Partial(how) for how in ("sum", "avg", "max", "min")]
    pairs: list[list[Placement]] = [[first, second] for first in kinds for second in kinds]
    factors: list[list[Placement]] = [[Partial("product"), other] for other in (R, S0, S1, Partial("product"))]
    return [
        ("cat", lambda *tensors: torch.cat(tensors, 1), [x, y], pairs + factors),
        ("add out", lambda x, y: torch.add(x, y, out=y.clone()), [x, y], pairs),
    ]


def _complexes() -> list[Case]:
    x, y = (torch.complex(_draw(5, 4, seed=seed), _draw(5, 4, seed=seed + 1)) for seed in (0, 2))

    def through(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        written = x.clone()
        written.conj()[1:3].mul_(2j)
        return written

    calls: dict[str, Callable[..., Any]] = {
        "conj rows": lambda x, _: x.conj()[1:3],
        "conj cat": lambda x, y: torch.cat([x.conj(), y]),
        "conj imag": lambda x, _: x.conj().imag,
        "mH": lambda x, y: x.mH @ y,
        "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y.conj()),
        "conj written": through,
        "corrcoef": lambda x, _: torch.corrcoef(x),
    }
    places: list[list[Placement]] = [[R, R], [S0, S0], [S1, S1], [Partial(), Partial()], [S0, R]]
    return [(name, call, [x, y], places) for name, call in calls.items()]


def _four_ranks() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (4,))
    wrong = []
    for name, run, tensors, layouts in _integers() + _shapes() + _norms() + _partials() + _complexes():
        for places in layouts:
            fitting = [
                place if not isinstance(place, Shard) or place.dim < tensor.ndim else R
                for tensor, place in zip(tensors, places, strict=True)
            ]
            placed = [_place(tensor, mesh, place) for tensor, place in zip(tensors, fitting, strict=True)]
            if _differs(run(*placed), run(*(tensor.clone() for tensor in tensors))):
                wrong.append(f"{name} {places}")
    return wrong


def test_integers_complex_numbers_and_kinds_of_partial():
    assert run_ranks(4, _four_ranks, deadline_s=240) == [[]] * 4
