"""The random state after a step of GradCache with dropout: that of a run without the cache, on the same layout."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from holdfast.train.embedding import GradCache, ReplicaEncoder
from holdfast.train.embedding.columns import Columns, gather_columns
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.layout import Layout
from holdfast.train.models.dropout import sample_keys
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.train_cases import VOCAB, model
from tests.train.embedding.toys import Encoder, encoder, texts

ROWS, LENGTHS, MICRO_BATCH, SEED = 11, (8, 5, 7), 4, 5
EVEN, UNEVEN = (6, 5), (8, 3)  # rows by data-parallel rank: 2 micro batches on each, or 2 and 1
DEADLINE_S = 200.0
LAYOUTS = {
    "fsdp-2": Layout(dp_shard=2),
    "zero1-2": Layout(dp_replicate=2, zero1=True),
    "tp-2": Layout(tp=2),
    "pp-2": Layout(pp=2),
    "ddp-2": Layout(dp_replicate=2),
    "tp-2-fsdp-2": Layout(tp=2, dp_shard=2),
    "pp-2-fsdp-2": Layout(pp=2, dp_shard=2),
    "pp-2-zero1-2": Layout(pp=2, dp_replicate=2, zero1=True),
}
SLICE = ("fsdp-2", "pp-2-fsdp-2")


def _config() -> Any:
    return model("qwen3", num_hidden_layers=2, tie_word_embeddings=True, residual_dropout=0.1, attention_dropout=0.2)


def _columns(rows: slice) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    columns = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(VOCAB, (ROWS, length), generator=draw)
        used = torch.randint(2, length + 1, (ROWS, 1), generator=draw)
        column = {"input_ids": ids, "attention_mask": (torch.arange(length) < used).long()}
        column["dropout_keys"] = sample_keys(3, 17, 1000 * number, ROWS)
        columns.append({name: values[rows] for name, values in column.items()})
    return columns


def _dropped_mean(hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pool with dropout of torch's generator, as a user's pooling may."""
    mask = inputs["attention_mask"][..., None]
    return nn.functional.dropout((hidden * mask).sum(1) / mask.sum(1), 0.3)


def _digest(state: torch.Tensor) -> str:
    return hashlib.sha256(state.numpy().tobytes()).hexdigest()


def _loss(columns: Columns) -> torch.Tensor:
    """A loss that draws random numbers too, after the embeddings and before the second pass."""
    torch.rand(7)
    share: torch.Tensor = InfoNCE(0.2)(columns)
    return share


def _rows(shares: tuple[int, ...], rank: int) -> slice:
    return slice(sum(shares[:rank]), sum(shares[: rank + 1]))


def _uncached(replica: Any, rows: slice) -> list[torch.Tensor]:
    """Encode the columns with a graph, a micro batch at a time."""
    found = []
    for column in _columns(rows):
        parts = zip(*(values.split(MICRO_BATCH) for values in column.values()), strict=True)
        inputs = [dict(zip(column, part, strict=True)) for part in parts]
        encode = ReplicaEncoder(replica, _dropped_mean)
        found.append(torch.cat([encode(part) for part in inputs]))
    return found


Outcome = tuple[float, float, str]  # the loss, the gradient's norm, the generator's state


def _cached_step(layout: Layout, shares: tuple[int, ...]) -> tuple[int, int, Outcome]:
    """On a rank: its stage and data-parallel rank, and the outcome of a step of GradCache."""
    replica = build(_config(), layout, dtype=torch.float64, head=False)
    rank = replica.meshes.dp_rank
    cache = GradCache(ReplicaEncoder(replica, _dropped_mean), _loss, micro_batch=MICRO_BATCH, sort=False)
    torch.manual_seed(SEED + rank)
    found = cache.step(_columns(_rows(shares, rank)))
    state = _digest(torch.get_rng_state())
    return replica.meshes.at("pp"), rank, (float(found), replica.gradient_norm(), state)


def _plain_step(layout: Layout, shares: tuple[int, ...]) -> Outcome:
    """On a rank: the outcome of the same step on the same layout with the whole graph in memory."""
    replica = build(_config(), layout, dtype=torch.float64, head=False)
    rank, group = replica.meshes.dp_rank, replica.meshes.data_group()
    torch.manual_seed(SEED + rank)
    share = _loss(gather_columns(_uncached(replica, _rows(shares, rank)), group))
    share.backward()
    state = _digest(torch.get_rng_state())
    replica.finish_gradients()
    whole = share.detach().clone()
    if group is not None:
        dist.all_reduce(whole, group=group)
    return float(whole), replica.gradient_norm(), state


@functools.cache
def _one_process(shares: tuple[int, ...]) -> tuple[float, float, list[str]]:
    """The outcome of one process that encodes the rows of each rank, with that rank's seed; the state after each."""
    replica = build(_config(), Layout(), dtype=torch.float64, head=False)
    parts, states = [], []
    for rank in range(len(shares)):
        torch.manual_seed(SEED + rank)
        parts.append(_uncached(replica, _rows(shares, rank)))
        torch.rand(7)  # those of the loss
        states.append(_digest(torch.get_rng_state()))
    loss = InfoNCE(0.2)(gather_columns([torch.cat(column) for column in zip(*parts, strict=True)], None))
    loss.backward()
    replica.finish_gradients()
    return loss.item(), replica.gradient_norm(), states


@pytest.mark.parametrize("shares", [pytest.param(EVEN, marks=pytest.mark.full), UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("layout", [pytest.param(x, marks=[] if x in SLICE else pytest.mark.full) for x in LAYOUTS])
def test_every_layout_leaves_the_state_of_one_process(layout: str, shares: tuple[int, ...]) -> None:
    """The pooling draws on the last stage; the stages before it draw nothing."""
    given = LAYOUTS[layout]
    shares = shares if given.dp == 2 else (ROWS,)
    loss, norm, states = _one_process(shares)
    for stage, rank, found in run_ranks(given.world, _cached_step, given, shares, deadline_s=DEADLINE_S):
        assert found[:2] == pytest.approx((loss, norm), rel=1e-6)
        untouched = _digest(torch.Generator().manual_seed(SEED + rank).get_state())
        assert found[2] == (states[rank] if stage == given.pp - 1 else untouched)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["fsdp-2", "zero1-2", "ddp-2", "tp-2", "tp-2-fsdp-2"])
def test_the_state_is_that_of_a_plain_run_of_the_layout(layout: str) -> None:
    """A pipeline has no plain run of these micro batches."""
    given = LAYOUTS[layout]
    shares = EVEN if given.dp == 2 else (ROWS,)
    cached = run_ranks(given.world, _cached_step, given, shares, deadline_s=DEADLINE_S)
    plain = run_ranks(given.world, _plain_step, given, shares, deadline_s=DEADLINE_S)
    for (_, _, found), truth in zip(cached, plain, strict=True):
        assert found[:2] == pytest.approx(truth[:2], rel=1e-6)
        assert found[2] == truth[2]


class _Run:
    """A user's module with dropout, wrapped as users wrap it."""

    def __init__(self, wrap: str) -> None:
        self.model: Encoder = encoder(0, dropout=0.3)
        self.trained: Any = DistributedDataParallel(self.model) if wrap == "ddp" else self.model
        if wrap == "fsdp":
            fully_shard(self.model, reshard_after_forward=True)
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
            if wrap == "zero1"
            else torch.optim.SGD(parameters, lr=0.1)
        )


def _module_step(wrap: str, shares: tuple[int, ...]) -> str:
    run, rank = _Run(wrap), dist.get_rank()
    torch.manual_seed(SEED + rank)
    cache = GradCache(run.trained, _loss, micro_batch=MICRO_BATCH, group=dist.group.WORLD)
    cache.step([column[_rows(shares, rank)] for column in texts(ROWS, 3)])
    run.optimizer.step()
    return _digest(torch.get_rng_state())


def _plain_module_step(wrap: str, shares: tuple[int, ...]) -> str:
    run, rank = _Run(wrap), dist.get_rank()
    torch.manual_seed(SEED + rank)
    columns = [column[_rows(shares, rank)] for column in texts(ROWS, 3)]
    found = [torch.cat([run.trained(part) for part in column.split(MICRO_BATCH)]) for column in columns]
    _loss(gather_columns(found, dist.group.WORLD)).backward()
    run.optimizer.step()
    return _digest(torch.get_rng_state())


@pytest.mark.parametrize("wrap", [*(pytest.param(x, marks=pytest.mark.full) for x in ("ddp", "fsdp")), "zero1"])
def test_a_module_of_the_user_leaves_the_state_of_its_plain_run(wrap: str) -> None:
    plain = run_ranks(2, _plain_module_step, wrap, EVEN)
    assert run_ranks(2, _module_step, wrap, EVEN) == plain
    assert plain[0] != plain[1]


def _alone(rank: int) -> str:
    module = encoder(0, dropout=0.3)
    torch.manual_seed(SEED + rank)
    for column in texts(ROWS, 3):
        for part in column[_rows(UNEVEN, rank)].split(MICRO_BATCH):
            module(part)
    torch.rand(7)  # those of the loss
    return _digest(torch.get_rng_state())


@pytest.mark.parametrize("wrap", [*(pytest.param(x, marks=pytest.mark.full) for x in ("ddp", "zero1")), "fsdp"])
def test_forward_passes_that_only_keep_up_with_other_ranks_draw_nothing(wrap: str) -> None:
    assert run_ranks(2, _module_step, wrap, UNEVEN) == [_alone(0), _alone(1)]
