"""Layouts that cannot be are refused before anything starts, with the nearest that can."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.train.layout import Layout, nearest_layouts
from holdfast.train.models.model_config import ModelConfig

DENSE = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
)
SPARSE = ModelConfig(
    family="qwen3_moe",
    vocab_size=96,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)

INTERLEAVED = {"pp": 2, "stages_per_rank": 2, "schedule": "interleaved"}
REFUSED: list[tuple[ModelConfig, int, dict[str, Any], str, dict[str, Any]]] = [
    # model, ranks, layout, what is said, the nearest that can be
    (DENSE, 4, {"dp_shard": 2}, "needs 2 ranks .* but there are 4", {"dp_shard": 4}),
    (DENSE, 4, {"tp": 4}, "2 key-value heads are not divisible by tp=4", {"tp": 2, "dp_shard": 2}),
    (DENSE, 3, {"tp": 3}, "8 attention heads are not divisible by tp=3", {"dp_shard": 3}),
    (DENSE, 8, {"pp": 8}, "6 layers are too few for 8 stages", {"pp": 4, "dp_shard": 2}),
    (DENSE, 2, {"pp": 2, "stages_per_rank": 2}, "schedule 1f1b supports 1 stage per rank, not 2", INTERLEAVED),
    (DENSE, 2, {"pp": 2, "schedule": "interleaved"}, "interleaved needs .* stages_per_rank of 2", {"pp": 2}),
    (DENSE, 2, {"pp": 2, "schedule": "interleaved"}, "layout pp=2 schedule=interleaved is invalid", {"pp": 2}),
    (DENSE, 2, {"dp_shard": 2, "ep": 2}, "a llama has no experts", {"dp_shard": 2}),
    (DENSE, 4, {"dp_replicate": 2, "dp_shard": 2, "zero1": True}, "zero1 supports only dp_replicate", {}),
    (SPARSE, 4, {"pp": 2, "dp_shard": 2, "ep": 4}, "ep=4 does not divide the 2 data-parallel", {}),
    (SPARSE, 6, {"dp_shard": 6, "ep": 6}, "8 experts are not divisible by 6 ranks", {"dp_shard": 6, "ep": 2}),
    (SPARSE, 12, {"dp_replicate": 2, "dp_shard": 6, "ep": 4}, "one must be a multiple of the other", {}),
]


@pytest.mark.parametrize(("model", "world", "sizes", "said", "nearest"), REFUSED, ids=lambda value: str(value)[:40])
def test_wrong_layouts_are_refused_with_the_nearest(
    model: ModelConfig, world: int, sizes: dict[str, Any], said: str, nearest: dict[str, Any]
) -> None:
    layout = Layout(**sizes)
    with pytest.raises(InvalidArgument, match=said) as refusal:
        layout.check(world, model)
    offered = nearest_layouts(layout, world, model)
    assert offered and all(str(one) in str(refusal.value) for one in offered)
    for one in offered:
        one.check(world, model)
    if nearest:
        assert offered[0] == Layout(**nearest)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        (DENSE, {}),
        (DENSE, {"pp": 3, "tp": 2, "dp_shard": 2, "dp_replicate": 2}),
        (DENSE, {"pp": 3, "schedule": "interleaved", "stages_per_rank": 2}),
        (DENSE, {"dp_replicate": 3, "pp": 2, "zero1": True}),
        (SPARSE, {"dp_shard": 8, "ep": 2}),
        (SPARSE, {"dp_replicate": 2, "dp_shard": 2, "ep": 4, "tp": 2, "pp": 2}),
    ],
)
@pytest.mark.raises_nothing
def test_right_layouts_pass(model: ModelConfig, sizes: dict[str, Any]) -> None:
    layout = Layout(**sizes)
    layout.check(layout.world, model)


def test_every_data_parallel_rank_has_its_place_among_experts() -> None:
    for replicate, shard, ep in [(1, 4, 2), (2, 2, 2), (2, 2, 4), (4, 1, 2), (2, 4, 2), (1, 4, 4)]:
        layout = Layout(dp_replicate=replicate, dp_shard=shard, ep=ep)
        assert layout.expert_replicate * layout.expert_shard * layout.ep == layout.dp


def test_interleaved_stages_go_around_and_cover_all_layers() -> None:
    layout = Layout(pp=2, schedule="interleaved", stages_per_rank=3)
    assert [layout.stages_of(rank) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 5]]
    assert [list(layout.layers_of(stage, DENSE)) for stage in range(6)] == [[0], [1], [2], [3], [4], [5]]


def test_what_makes_no_sense_at_all_is_refused_at_once() -> None:
    with pytest.raises(InvalidArgument, match="tp=0"):
        Layout(tp=0)
    with pytest.raises(InvalidArgument, match="gpipe"):
        Layout(schedule="gpipe")


def test_a_world_that_no_layout_fills_says_so() -> None:
    odd = ModelConfig(
        vocab_size=7,
        hidden_size=6,
        intermediate_size=7,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    with pytest.raises(InvalidArgument, match="dp_shard=5"):
        Layout(tp=5).check(5, odd)


def test_which_counts_of_micro_batches_torch_makes_a_schedule_for() -> None:
    layout = Layout(pp=2, schedule="interleaved", stages_per_rank=2)
    assert [count for count in range(1, 13) if layout.takes(count)] == [1, 2, 3, 4, 6, 8, 10, 12]
    assert [count for count in range(1, 5) if Layout(pp=3).takes(count)] == [3, 4]


def test_layers_that_do_not_divide_are_spread_as_evenly_as_they_can_be() -> None:
    layout = Layout(pp=4)
    layout.check(4, DENSE)
    assert [list(layout.layers_of(stage, DENSE)) for stage in range(4)] == [[0], [1, 2], [3], [4, 5]]
