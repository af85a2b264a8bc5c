"""Indices out of range: the error of one device, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tests.dist.harness import run_ranks
from tests.spmd.judge import place

ROWS, COLUMNS, ASKED = 6, 5, 7
R, P, ROW, COLUMN = Replicate(), Partial(), Shard(0), Shard(1)
TABLES = {(4,): [(R,), (ROW,), (COLUMN,), (P,)], (2, 2): [(R, ROW), (ROW, COLUMN), (ROW, ROW), (P, ROW)]}
INDICES = {(4,): [(R,), (ROW,)], (2, 2): [(R, ROW), (ROW, R), (ROW, ROW)]}
Lookup = Callable[[Any, Any], Any]


def _set(x: Any, index: Any) -> Any:
    x = x.clone()
    x[index] = 1.0
    return x


LOOKUPS: dict[str, Lookup] = {
    "x[i]": lambda x, i: x[i],
    "x[:, i]": lambda x, i: x[:, i],
    "x[i, i]": lambda x, i: x[i, i],
    "x[i] = 1": _set,
    "index_put": lambda x, i: x.index_put((i, i), _beside(torch.tensor(1.0), x), accumulate=True),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i[:6], x),
    "gather": lambda x, i: x.gather(1, i[:6, None]),
    "scatter": lambda x, i: x.scatter(1, i[:6, None], 1.0),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "take": lambda x, i: x.take(i * COLUMNS),
    "embedding": lambda x, i: F.embedding(i, x),
    "cross_entropy sum": lambda x, i: F.cross_entropy(x, i[:6], reduction="sum"),
    "cross_entropy none": lambda x, i: F.cross_entropy(x, i[:6], reduction="none"),
}
MEANS: dict[str, Lookup] = {
    "cross_entropy": lambda x, i: F.cross_entropy(x, i[:6]),
    "cross_entropy weights": lambda x, i: F.cross_entropy(x, i[:6], weight=_beside(torch.arange(5.0) + 1, x)),
    "cross_entropy smoothed": lambda x, i: F.cross_entropy(x, i[:6], label_smoothing=0.1),
}
PLAIN = ("x[i]", "x[:, i]", "x[i, i]", "x[i] = 1", "index_select", "gather", "scatter", "index_fill", "take")


def _beside(tensor: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return distribute_tensor(tensor, x.device_mesh, [R] * x.device_mesh.ndim) if isinstance(x, DTensor) else tensor


def _outcome(lookup: Lookup, x: Any, index: Any) -> tuple[str, str]:
    try:
        lookup(x, index)
    except (IndexError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _differences(
    mesh: DeviceMesh, lookup: Lookup, bad: int, indices: list[Any], tables: list[tuple[Placement, ...]]
) -> Iterator[str]:
    """Where the outcome is not that of one device; `indices` are placements, or what to make of the plain tensor."""
    whole, index = torch.randn(ROWS, COLUMNS), torch.arange(ASKED) % 4
    index[4] = bad
    expected, message = _outcome(lookup, whole, index)
    for places in tables:
        for how in indices:
            given = place(index, mesh, how) if isinstance(how, tuple) else how(index)
            found, ours = _outcome(lookup, place(whole, mesh, places), given)
            same = ours.rstrip(".").startswith(message.rstrip(".")) or ("out of" in ours and "out of" in message)
            if found != expected or not same:
                yield f"{bad} {places} {how}: {found} {ours!r}, not {expected} {message!r}"


SLICES = 8


def _slice_of(lookups: dict[str, Lookup], slice_number: int) -> dict[str, Lookup]:
    return dict(list(lookups.items())[slice_number::SLICES])


def _wrong(
    lookups: dict[str, Lookup], indices: Callable[[str, tuple[int, ...]], list[Any]], **options: bool
) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable(**options)
    return [
        f"{name}: {difference}"
        for shape, tables in TABLES.items()
        for name, lookup in lookups.items()
        for bad in (99, -99)
        for difference in _differences(init_device_mesh("cpu", shape), lookup, bad, indices(name, shape), tables)
    ]


def _every_rank_has_them(name: str, shape: tuple[int, ...]) -> list[Any]:
    return [(R,) * len(shape), *([lambda index: index] if name in PLAIN else [])]


def _out_of_range(slice_number: int) -> list[str]:
    every = _slice_of({**LOOKUPS, **MEANS}, slice_number)
    return [
        *_wrong(every, _every_rank_has_them),
        *_wrong(_slice_of(MEANS, slice_number), lambda _, shape: INDICES[shape]),
        *_wrong(every, lambda _, shape: INDICES[shape], check_indices=True),
    ]


@pytest.mark.sliced(SLICES)
@pytest.mark.parametrize("slice_number", range(SLICES))
def test_every_rank_raises_what_one_device_raises(slice_number: int) -> None:
    assert run_ranks(4, _out_of_range, slice_number, deadline_s=240) == [[]] * 4


def _in_range(slice_number: int) -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable(check_indices=True)
    wrong = []
    for shape, tables in TABLES.items():
        mesh = init_device_mesh("cpu", shape)
        whole, index = torch.randn(ROWS, COLUMNS), torch.arange(ASKED) % 4
        for name, lookup in _slice_of({**LOOKUPS, **MEANS}, slice_number).items():
            for places in tables:
                for how in INDICES[shape]:
                    found = lookup(place(whole, mesh, places), place(index, mesh, how))
                    if not torch.allclose(found.full_tensor(), lookup(whole, index)):
                        wrong.append(f"{name} {places} {how}")
                    if _outcome(lookup, place(whole, mesh, places), place(index + 9, mesh, how))[0] == "no error":
                        wrong.append(f"{name} {places} {how}: no error after a right call, as if it were cached")
    return wrong


@pytest.mark.full
@pytest.mark.parametrize("slice_number", range(SLICES))
def test_right_indices_stay_right_where_they_are_checked(slice_number: int) -> None:
    assert run_ranks(4, _in_range, slice_number, deadline_s=240) == [[]] * 4


def _no_numbers() -> list[bool]:
    """Class weights that are no numbers are no targets out of range."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (2,))
    scores, target = torch.randn(6, 5), torch.arange(6) % 5
    weight = torch.tensor([1.0, torch.nan, 1.0, 1.0, 1.0])
    expected = F.cross_entropy(scores, target, weight)
    placed = [distribute_tensor(scores, mesh, [ROW]), distribute_tensor(target, mesh, [ROW])]
    found = F.cross_entropy(*placed, distribute_tensor(weight, mesh, [R]))
    return [bool(expected.isnan()), bool(found.full_tensor().isnan())]


def test_class_weights_that_are_no_numbers():
    assert run_ranks(2, _no_numbers, deadline_s=120) == [[True, True]] * 2
