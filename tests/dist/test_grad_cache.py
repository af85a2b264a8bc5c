"""GradCache over ranks: the gradients of the whole batch, whoever holds which rows and however they are added up."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.core.errors import InvalidArgument, PeerFailed
from holdfast.train.embedding import GradCache
from holdfast.train.embedding.losses import CoSENT, FalseNegatives, InfoNCE, KLDistillation, MarginMSE, Matryoshka
from tests.dist.harness import run_ranks
from tests.train.embedding.toys import distance, encoder, texts

pytestmark = pytest.mark.sliced(5)

ROWS = 11
SHARES = {2: (8, 3), 3: (5, 1, 5), 4: (2, 6, 2, 1)}  # rows by rank
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
LABELS = torch.tensor([0.0, 1, 2, 2, 1, 3, 0, 5, 4, 4, 2], dtype=torch.float64)
SCORES = torch.linspace(-1, 1, 2 * ROWS, dtype=torch.float64).sin().reshape(ROWS, 2)
# The number of each row's query, positive and negative: rows 0 and 8 have one positive, and 10's is a negative of 1.
TEXTS = torch.arange(3 * ROWS).reshape(ROWS, 3)
TEXTS[8, 1], TEXTS[1, 2] = TEXTS[0, 1], TEXTS[10, 1]

LOSSES: dict[str, tuple[Any, int, dict[str, torch.Tensor]]] = {  # a loss, the columns, what it is given of each row
    "learned temperature": (lambda: InfoNCE(0.1, learned=True, tile_rows=2, tile_columns=5), 3, {}),
    "all directions": (lambda: InfoNCE(directions=DIRECTIONS), 3, {}),
    "same texts": (lambda: InfoNCE(directions=DIRECTIONS), 3, {"texts": TEXTS}),
    "false negatives": (lambda: InfoNCE(false_negatives=FalseNegatives(0.05)), 3, {}),
    "matryoshka": (lambda: Matryoshka(InfoNCE(), [16, 4]), 2, {}),
    "cosent": (CoSENT, 2, {"labels": LABELS}),
    "margins": (MarginMSE, 3, {"scores": SCORES}),
    "distribution": (KLDistillation, 3, {"scores": SCORES}),
}


def _step(kind: str, wrap: str, shares: tuple[int, ...], steps: int = 1) -> Any:
    """Return the loss and the gradients, of the model and of the loss, after a step with this rank's rows."""
    make_loss, columns, extras = LOSSES[kind]
    rank = dist.get_rank() if dist.is_initialized() else 0
    first = sum(shares[:rank])
    own = slice(first, first + shares[rank])
    model, loss = encoder(0), make_loss().double()
    group = dist.group.WORLD if dist.is_initialized() else None
    trained: Any = DistributedDataParallel(model) if wrap == "ddp" else model
    if wrap == "fsdp":
        fully_shard(model, reshard_after_forward=True)  # every forward communicates, in the group of the batch
    cache = GradCache(trained, loss, micro_batch=2, group=group)
    found = torch.zeros(())
    for _ in range(steps):
        data = [column[own] for column in texts(ROWS, columns)]
        found = cache.step(data, scale=1 / steps, **{name: values[own] for name, values in extras.items()})
    grads = [p.grad for p in (*model.parameters(), *loss.parameters())]
    evaluated = cache.evaluate(data, **{name: values[own] for name, values in extras.items()})
    assert torch.equal(evaluated, found) or distance(evaluated, found) < 1e-12
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in grads]
    return found.tolist(), torch.cat([gradient.double().flatten() for gradient in whole]).tolist()


@functools.cache
def _alone(kind: str) -> Any:
    return _step(kind, "plain", (ROWS,))


def _check(found: list[Any], truth: Any) -> None:
    for of_rank in found:
        for values, right in zip(of_rank, truth, strict=True):
            assert distance(torch.tensor(values, dtype=torch.float64), torch.tensor(right, dtype=torch.float64)) < 1e-12


@pytest.mark.sliced(99)
@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("kind", LOSSES)
def test_uneven_rows_on_ranks_have_the_gradients_of_one_process(kind: str, wrap: str) -> None:
    _check(run_ranks(2, _step, kind, wrap, SHARES[2]), _alone(kind))


@pytest.mark.full
@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("world", [3, 4])
def test_more_ranks(world: int, wrap: str) -> None:
    _check(run_ranks(world, _step, "same texts", wrap, SHARES[world]), _alone("same texts"))


@pytest.mark.parametrize("wrap", ["plain", "ddp", "fsdp"])
def test_steps_accumulate(wrap: str) -> None:
    _check(run_ranks(2, _step, "learned temperature", wrap, SHARES[2], 3), _alone("learned temperature"))


def test_texts_and_margins_leave_candidates_out() -> None:
    assert abs(_alone("same texts")[0] - _alone("all directions")[0]) > 1e-3


def _refused(columns_of: tuple[int, int], rows_of: tuple[int, int]) -> list[str]:
    """On a rank: the error of a batch that one rank cannot use, and that the next batch works."""
    rank = dist.get_rank()
    model = encoder(0)
    cache = GradCache(model, InfoNCE(), micro_batch=2, group=dist.group.WORLD)
    try:
        cache.step(texts(rows_of[rank], columns_of[rank]))
        said = "nothing"
    except (InvalidArgument, PeerFailed) as error:
        said = f"{type(error).__name__}: {error}"
    assert all(parameter.grad is None for parameter in model.parameters())
    cache.step(texts(3, 2))
    return [said, str(all(parameter.grad is not None for parameter in model.parameters()))]


@pytest.mark.parametrize(
    ("columns", "rows", "said"),
    [
        ((2, 2), (3, 0), ("PeerFailed: another rank cannot use its rows", "InvalidArgument: column 0 has no rows")),
        ((3, 2), (3, 3), ("InvalidArgument: this rank has 3 columns, and the ranks have 2 to 3",) * 2),
    ],
)
def test_what_one_rank_cannot_use_no_rank_waits_for(columns: Any, rows: Any, said: tuple[str, str]) -> None:
    for number, (found, works) in enumerate(run_ranks(2, _refused, columns, rows)):
        assert found.replace("has 2 columns", "has 3 columns").startswith(said[number]) and works == "True"
