"""What a layout is combined with: blocks computed again, bf16 work on fp32 parameters, dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.layout import Layout
from holdfast.train.loss import MicroBatch
from holdfast.train.parallel.parallel_model import build
from tests.dist.harness import run_ranks
from tests.dist.train_cases import LAYOUTS, assemble, batches, model, pieces, share

pytestmark = pytest.mark.sliced(4)

DEADLINE_S = 200.0
CONFIG = model("qwen3_moe")
MICRO_BATCHES = 4
CHOSEN = ("fsdp-4", "tp-2-dp-2", "ep-2-pp-2", "ep-2-dp-4")


def _gradients(layout: Layout, dtype: torch.dtype, recompute: bool) -> Any:
    replica = build(CONFIG, layout, dtype=dtype, recompute=recompute)
    sums = replica.forward_backward(share(replica, batches(MICRO_BATCHES)))
    assert {p.dtype for p in replica.module.parameters()} == {torch.float32}
    return pieces({key: p.grad for key, p in replica.parameters().items()}), sums.total


def _every_option(layout: Layout) -> dict[str, Any]:
    return {
        "recomputed": _gradients(layout, torch.float32, recompute=True),
        "rounded": _gradients(layout, torch.bfloat16, recompute=False),
    }


@pytest.mark.parametrize("layout", CHOSEN)
def test_recomputed_blocks_and_rounded_work_on_ranks(layout: str) -> None:
    exact, loss = _gradients(Layout(), torch.float32, recompute=False)
    truth = assemble([exact])
    found = run_ranks(LAYOUTS[layout].world, _every_option, LAYOUTS[layout], deadline_s=DEADLINE_S)
    for option, tolerance in (("recomputed", 1e-5), ("rounded", 0.1)):
        gradients = assemble([rank[option][0] for rank in found])
        whole = torch.cat([(gradients[key] - value).flatten() for key, value in truth.items()])
        assert float(whole.norm()) < tolerance * float(torch.cat([v.flatten() for v in truth.values()]).norm()), option
        assert all(rank[option][1] == pytest.approx(loss, rel=tolerance) for rank in found)


def _deep(layout: Layout) -> Any:
    replica = build(model("qwen3_moe", num_hidden_layers=8), layout)
    replica.forward_backward(share(replica, batches(MICRO_BATCHES)))
    return pieces({key: p.grad for key, p in replica.parameters().items()})


def test_four_ranks_interleave_eight_stages() -> None:
    layout = Layout(pp=4, schedule="interleaved", stages_per_rank=2)
    gradients = assemble(run_ranks(4, _deep, layout, deadline_s=DEADLINE_S))
    for key, value in assemble([_deep(Layout())]).items():
        assert float((gradients[key] - value).norm() / value.norm()) < 1e-5, key


def _middle_stage_without_values() -> float:
    """Ranks between first and last stage are told of shapes alone, as their feed does."""
    replica = build(CONFIG, LAYOUTS["pp-4"])
    given = []
    for batch in batches(MICRO_BATCHES):
        ids, labels = batch.input_ids, batch.labels
        given.append(
            MicroBatch(
                ids if replica.needs_inputs else ids.to("meta"), labels if replica.needs_labels else labels.to("meta")
            )
        )
    return replica.forward_backward(given).total


def test_stages_that_need_no_values_get_none() -> None:
    expected = build(CONFIG, Layout()).forward_backward(batches(MICRO_BATCHES)).total
    for total in run_ranks(4, _middle_stage_without_values, deadline_s=DEADLINE_S):
        assert total == pytest.approx(expected, rel=1e-6)


def _refused(layout: Layout) -> list[str]:
    said = []
    replica = build(CONFIG, layout)
    whole = batches(2)
    odd = MicroBatch(whole[0].input_ids[:, :7], whole[0].labels[:, :7])
    for given in ([odd, odd], [whole[0], MicroBatch(whole[1].input_ids[:1], whole[1].labels[:1])]):
        with pytest.raises(InvalidArgument) as refusal:
            replica.forward_backward(given)
        said.append(str(refusal.value))
    return said


def test_batches_that_a_layout_cannot_take_are_refused() -> None:
    for said in run_ranks(4, _refused, LAYOUTS["pp-2-tp-2"], deadline_s=DEADLINE_S):
        assert "sequences of 7 tokens are not divisible by tp=2" in said[0]
        assert "must have one shape" in said[1]


def _world_is_checked() -> str:
    with pytest.raises(InvalidArgument) as refusal:
        build(CONFIG, Layout(dp_shard=4))
    return str(refusal.value)


def test_a_layout_for_another_world_is_refused_before_anything_starts() -> None:
    for said in run_ranks(2, _world_is_checked, deadline_s=DEADLINE_S):
        assert "needs 4 ranks" in said and "Nearest valid for 2 ranks: dp_shard=2" in said
