"""Save plans: groups split into files, blocks of the ranks that matter, the commit of a layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from holdfast.core.ranks import SingleProcess
from holdfast.engine.checkpoint_plan import plan_checkpoint
from holdfast.engine.options import SaveOptions
from holdfast.engine.survey import Survey, Surveyor
from tests.engine.ranks import ThreadRanks, on_ranks

SMALL = SaveOptions(max_shard_size=8192, block_bytes=4096)


def survey_of(state: dict[str, Any], options: SaveOptions = SMALL) -> Survey:
    return Surveyor(options).survey(SingleProcess(), state, "here")


def test_groups_are_split_into_files_of_at_most_a_shard() -> None:
    survey = survey_of({"model": {f"w{number}": torch.ones(1000) for number in range(6)}, "ema": torch.ones(3)})
    plan = plan_checkpoint(survey.agreement, SMALL)
    assert {group: len(files) for group, files in plan.groups.items()} == {"model": 3, "ema": 1}
    assert sorted(plan.group_of) == sorted(file.name for file in plan.save.files)
    assert all(file.size <= 8192 + 4096 for file in plan.save.files)
    covered = sum(block.size for block in plan.save.blocks)
    assert covered == sum(file.size for file in plan.save.files), "every byte has one owner"


def test_the_commit_names_files_keys_and_replicas() -> None:
    survey = survey_of({"model": nn.Linear(3, 2)})
    plan = plan_checkpoint(survey.agreement, SMALL, [("model", "bias")])
    commit = plan.commit(SMALL.block_bytes)
    assert commit.block_bytes == 4096 and commit.world == 1 and commit.hosts == 1
    assert commit.first_replica == ("model: bias",)
    assert set(commit.keys["model"]) == {"weight", "bias"}
    assert [file.size for file in commit.files] == [file.size for file in plan.save.files]
    assert commit.groups["model"].total_bytes == (6 + 2) * 4


def test_a_plan_for_some_ranks_leaves_out_the_rest() -> None:
    def survey(ranks: ThreadRanks) -> Survey:
        state = {"shared": torch.ones(5000), f"own{ranks.rank}": torch.ones(5000)}
        return Surveyor(SMALL).survey(ranks, state, "here")

    agreement = on_ranks(2, survey)[0].agreement
    whole = plan_checkpoint(agreement, SMALL)
    ours = plan_checkpoint(agreement, SMALL, only=[0], all_files=False)
    assert set(whole.groups["own1"]) and not ours.groups["own1"], "rank 0 has no bytes of it"
    assert ours.groups["own0"] == whole.groups["own0"]
    assert {block.owner for block in whole.save.blocks} == {0, 1}
    kept = {(block.file, block.offset, block.owner) for block in ours.save.blocks}
    assert {entry for entry in kept if entry[2] == 0} == {
        (block.file, block.offset, 0) for block in whole.save.blocks if block.owner == 0
    }
    all_files = plan_checkpoint(agreement, SMALL, only=[0])
    assert all_files.groups == whole.groups, "the committing rank names every file"
    theirs = {file.name for file in whole.groups["own1"]}
    assert not any(block.file in theirs for block in all_files.save.blocks), "and plans only its own blocks"
