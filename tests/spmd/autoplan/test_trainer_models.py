"""The trainer's dense and sparse decoders: a plan communicates no more than the tensor parallelism written by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.spmd import plan
from holdfast.train.models.decoder import Decoder
from tests.dist.harness import run_ranks
from tests.dist.train_cases import batches, model
from tests.spmd.autoplan.meshes import pretended_mesh
from tests.spmd.autoplan.planned import compare_all

Case = tuple[str, dict[str, Any]]
SMALL = {"num_hidden_layers": 2}
AT_2: list[Case] = [
    ("qwen2", SMALL | {"tie_word_embeddings": True}),
    ("qwen3_moe", SMALL),
    ("qwen2_moe", SMALL),
]
AT_4: list[Case] = [
    ("llama", SMALL | {"num_attention_heads": 8, "num_key_value_heads": 4}),
    ("qwen3_moe", SMALL | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
]


@pytest.mark.sliced(2)
@pytest.mark.parametrize(("ranks", "cases"), [(2, AT_2), (4, AT_4)], ids=["tp-2", "tp-4"])
def test_a_plan_moves_no_more_than_the_plan_by_hand_and_trains_the_same(ranks: int, cases: list[Case]) -> None:
    planned = []
    with pretended_mesh("tp", ranks) as mesh:
        for family, changes in cases:
            with torch.device("meta"):
                made = Decoder(model(family, **changes))
            planned.append((family, changes, plan(made, mesh, [batches(1)[0].input_ids]).to_dict()))
    answers = run_ranks(ranks, compare_all, planned, deadline_s=120)
    for (family, _, fields), *all_ranks in zip(planned, *answers, strict=True):
        for found in all_ranks:
            assert found["planned"] <= found["hand"], (family, found)
            assert found["loss"] < 1e-5 and found["gradients"] < 1e-5, (family, found)
        said, heard = fields["moved_bytes"], all_ranks[0]["planned"] - all_ranks[0]["loss bytes"]
        assert abs(said - heard) <= (0.1 * heard if family.endswith("moe") else 0), (family, said, all_ranks[0])
