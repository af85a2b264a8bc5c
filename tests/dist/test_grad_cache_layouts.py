"""GradCache with the trainer's model: the loss and gradients of one process that keeps its graph, on every layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding import GradCache, ReplicaEncoder, pipeline_passes
from holdfast.train.embedding.columns import gather_columns
from holdfast.train.embedding.losses import InfoNCE
from holdfast.train.layout import Layout
from holdfast.train.models.dropout import sample_keys
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.train_cases import DENSE, SPARSE, VOCAB, assemble, model, pieces

ROWS, LENGTHS = 11, (8, 5, 7)  # of the batch; of its columns
SHARES = {1: (ROWS,), 2: (8, 3), 3: (5, 1, 5), 4: (2, 6, 2, 1)}  # rows by data-parallel rank
MICRO_BATCH = 4
TEXTS = torch.arange(3 * ROWS).reshape(ROWS, 3)
TEXTS[8, 1], TEXTS[1, 2] = TEXTS[0, 1], TEXTS[10, 1]
DROPOUT = {"attention_dropout": 0.2, "residual_dropout": 0.1, "embedding_dropout": 0.3}
TP, PP = Layout(tp=2), Layout(pp=2)
EVERY = {"pp-2": PP, **DENSE, "zero1-4": Layout(dp_replicate=4, zero1=True)}
EVERY |= {"fsdp-3": Layout(dp_shard=3), "zero1-3": Layout(dp_replicate=3, zero1=True)}
DEADLINE_S = 200.0


def _config(layers: int = 2, *, sparse: bool = False) -> Any:
    sizes = {"num_hidden_layers": layers, "tie_word_embeddings": True, **DROPOUT}
    return model("qwen3_moe", **sizes, router_aux_loss_coef=0.0) if sparse else model("qwen3", **sizes)


def _columns(rows: slice, *, dropout: bool = True) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    columns = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(VOCAB, (ROWS, length), generator=draw)
        used = torch.randint(2, length + 1, (ROWS, 1), generator=draw)
        column = {"input_ids": ids, "attention_mask": (torch.arange(length) < used).long()}
        if dropout:
            column["dropout_keys"] = sample_keys(3, 17, 1000 * number, ROWS)
        columns.append({name: values[rows] for name, values in column.items()})
    return columns


def _mean(hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    mask = inputs["attention_mask"][..., None]
    return (hidden * mask).sum(1) / mask.sum(1)


def _state(replica: Any, loss: Any, found: torch.Tensor, evaluated: torch.Tensor) -> dict[str, Any]:
    """Take an optimizer step, and return everything that layouts must agree on."""
    state = {
        "losses": [float(found), float(evaluated)],
        "norm": replica.gradient_norm(),
        "temperature": [float(parameter.grad) for parameter in loss.parameters()],
        "gradients": pieces({key: p.grad for key, p in replica.parameters().items()}),
    }
    replica.make_optimizer(torch.optim.SGD, lr=0.1).step()
    return state | {"trained": pieces(dict(replica.parameters()))}


def _step(layout: Layout, config: Any, causal: bool, run: int, micro_batch: int) -> dict[str, Any]:
    """On a rank: a batch in two halves of the gradient, dropped as one process drops."""
    pipeline_passes.RUN = run
    replica = build(config, layout, dtype=torch.float64, head=False)
    shares, rank = SHARES[layout.dp], replica.meshes.dp_rank
    rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    loss = InfoNCE(0.2, learned=True)
    cache = GradCache(ReplicaEncoder(replica, _mean, causal=causal), loss, micro_batch=micro_batch)
    for _ in range(2):
        found = cache.step(_columns(rows), scale=0.5, texts=TEXTS[rows])
    evaluated = cache.evaluate(_columns(rows, dropout=False), texts=TEXTS[rows])
    return _state(replica, loss, found, evaluated)


@functools.cache
def _alone(config: Any, causal: bool = True) -> dict[str, Any]:
    """The truth: one process, all rows at once, without GradCache."""
    replica, loss = build(config, Layout(), dtype=torch.float64, head=False), InfoNCE(0.2, learned=True)

    def value(dropout: bool) -> torch.Tensor:
        found = []
        for column in _columns(slice(ROWS), dropout=dropout):
            visible = None if causal else column["attention_mask"].bool()
            out: Any = replica.module(column["input_ids"], keys=column.get("dropout_keys"), visible=visible)
            found.append(_mean(out[0] if isinstance(out, tuple) else out, column))
        return loss(gather_columns(found, None), texts=TEXTS)

    whole = value(dropout=True)
    whole.backward()
    replica.finish_gradients()
    return _state(replica, loss, whole.detach(), value(dropout=False).detach())


def _compare(
    layout: Layout,
    config: Any,
    *,
    causal: bool = True,
    run: int = pipeline_passes.RUN,
    micro_batch: int = MICRO_BATCH,
) -> None:
    found = run_ranks(layout.world, _step, layout, config, causal, run, micro_batch, deadline_s=DEADLINE_S)
    truth = _alone(config, causal)
    for what in ("gradients", "trained"):
        whole, expected = assemble([rank[what] for rank in found]), assemble([truth[what]])
        assert whole.keys() == expected.keys()
        for key, value in expected.items():
            assert float((whole[key] - value).norm() / value.norm()) < 1e-6, f"{what} of {key}"
    for rank in found:
        for what in ("losses", "norm", "temperature"):
            assert rank[what] == pytest.approx(truth[what], rel=1e-6), what
        assert (rank["losses"], rank["norm"]) == (found[0]["losses"], found[0]["norm"])


@pytest.mark.full
def test_sequence_parallel_and_sharded_ranks_have_the_gradients_of_one_process() -> None:
    _compare(Layout(tp=2, dp_shard=2), _config(), micro_batch=2 * MICRO_BATCH)


def test_stages_and_sharded_ranks_have_them_in_several_runs_of_a_schedule() -> None:
    """Three micro batches of one rank and six of the other make three runs of two."""
    _compare(Layout(pp=2, dp_shard=2), _config(), run=1)


def test_a_sharded_optimizer_has_them() -> None:
    _compare(Layout(dp_replicate=2, zero1=True), _config())


@pytest.mark.full
@pytest.mark.parametrize("layout", EVERY)
def test_every_layout_has_them(layout: str) -> None:
    _compare(EVERY[layout], _config(max(2, EVERY[layout].stages)))


@pytest.mark.full
@pytest.mark.parametrize("layout", SPARSE)
def test_experts_have_them(layout: str) -> None:
    _compare(SPARSE[layout], _config(sparse=True))


@pytest.mark.full
@pytest.mark.parametrize("layout", [TP, PP], ids=str)
def test_attention_in_both_directions_has_them(layout: Layout) -> None:
    _compare(layout, _config(), causal=False)


def _impossible(hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    raise InvalidArgument("no such pooling")


def _failing() -> list[Any]:
    replica = build(_config(), PP, head=False)
    said = []
    for pool in (lambda hidden, inputs: hidden, _impossible):
        try:
            GradCache(ReplicaEncoder(replica, pool), InfoNCE(0.2), micro_batch=4).step(_columns(slice(ROWS)))
        except InvalidArgument as error:
            said.append(str(error))
    kept = all(parameter.grad is None for parameter in replica.module.parameters())
    GradCache(ReplicaEncoder(replica, _mean), InfoNCE(0.2), micro_batch=MICRO_BATCH).step(_columns(slice(ROWS)))
    return [*said, kept, replica.gradient_norm() > 0]


def test_an_error_on_the_last_stage_is_raised_on_every_stage() -> None:
    words = "encode returned [4, 8, 32] for 4 rows; expected [rows, dim]"
    assert run_ranks(2, _failing, deadline_s=DEADLINE_S) == [[words, "no such pooling", True, True]] * 2
