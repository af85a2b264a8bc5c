"""Inference mode: DTensor meets whole what elsewhere comes to it in parts; the numbers stay those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.dist.harness import run_ranks
from tests.spmd.judge import Listener, place

ROWS, CLASSES = 7, 5  # neither divides by the ranks


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


TARGETS = torch.arange(ROWS * 3).view(ROWS, 3) % CLASSES
SOFT = _draw(ROWS, CLASSES, 3, seed=1).softmax(1)
TABLE, WEIGHT, BIAS = _draw(CLASSES, 4, seed=2), _draw(6, 3, seed=3), _draw(6, seed=4)

CALLS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "cross_entropy": (F.cross_entropy, [TARGETS]),
    "soft cross_entropy": (F.cross_entropy, [SOFT]),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(1), y, reduction="batchmean"), [SOFT]),
    "poisson_nll": (F.poisson_nll_loss, [SOFT]),
    "linear": (F.linear, [WEIGHT, BIAS]),
    "matmul": (lambda x, w: x @ w.clone().t(), [WEIGHT]),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), []),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), []),
    "embedding_bag": (lambda x, i, w: F.embedding_bag(i, w), [TARGETS, TABLE]),
    "one_hot": (lambda x, i: F.one_hot(i, CLASSES), [TARGETS]),
    "narrow": (lambda x: x.narrow(0, 2, 3), []),
    "cov": (lambda x: torch.cov(x.flatten(1)), []),
}


def _differs(run: Callable[..., Any], wholes: list[torch.Tensor], mesh: DeviceMesh, places: list[Any]) -> bool:
    expected = run(*wholes)
    outside = [place(whole, mesh, (where,)) for whole, where in zip(wholes, places, strict=True)]
    with torch.inference_mode():
        found = run(outside[0].clone(), *outside[1:]).full_tensor()
    return found.dtype != expected.dtype or not torch.allclose(found, expected)


def _findings() -> list[str]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    for name, (run, others) in CALLS.items():
        for first in (Replicate(), Shard(0), Shard(1)):
            for second in (Replicate(), Shard(0)):
                places = [first, *[second] * len(others)]
                if _differs(run, [_draw(ROWS, CLASSES, 3), *others], mesh, places):
                    wrong.append(f"{name} {places}")
    return wrong


def test_what_is_made_of_others_is_taken_apart():
    assert run_ranks(4, _findings, deadline_s=240) == [[]] * 4


def _drawn() -> bool:
    import holdfast.spmd

    holdfast.spmd.enable()
    torch.manual_seed(3)
    ones = place(torch.ones(64, 64), init_device_mesh("cpu", (4,)), (Shard(0),))
    with torch.inference_mode():
        kept = F.dropout(ones, 0.5).full_tensor().view(4, -1)
    return not any(torch.equal(kept[0], rows) for rows in kept[1:])


def test_shards_drop_numbers_of_their_own():
    assert run_ranks(4, _drawn, deadline_s=120) == [True] * 4


def _moved() -> dict[str, int]:
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh, moved = init_device_mesh("cpu", (4,)), {}
    x, weight = place(_draw(8, 3), mesh, (Shard(0),)), place(WEIGHT, mesh, (Replicate(),))
    calls: dict[str, Callable[[], DTensor]] = {
        "linear": lambda: F.linear(x, weight),
        "softmax": lambda: x.softmax(1),
        "dropout": lambda: F.dropout(x, 0.5, training=False),
        "layer_norm": lambda: F.layer_norm(x, (3,)),
    }
    for name, run in calls.items():
        with torch.inference_mode(), Listener() as listener:
            run()
            run()
        moved[name] = listener.bytes
    return moved


def test_rows_apart_need_not_talk():
    assert run_ranks(4, _moved, deadline_s=120)[0] == dict.fromkeys(("linear", "softmax", "dropout", "layer_norm"), 0)
