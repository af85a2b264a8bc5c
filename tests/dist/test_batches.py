"""A plain FSDP2 loop with a DataLoader, killed amid an epoch: every loss is that of a run that never stopped."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from tests.dist.harness import Victims, run_ranks, tell_parent

STEPS, SAVED, HELD_AT = 14, 9, 11  # an epoch has 6 steps
DEADLINE_S = 120.0


class Noisy(Dataset[tuple[int, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        row = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return index, row + 0.1 * torch.rand(8)  # an augmentation that draws from the global stream


def train(root: str, workers: int, hold: bool) -> list[tuple[list[int], str]]:
    """The samples and the loss of every step of this rank."""
    process: Any = multiprocessing.current_process()
    process._config["daemon"] = False  # a daemon may not start the workers of a loader
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(100 + rank)
    sampler: Any = DistributedSampler(Noisy(), shuffle=True, seed=7)
    options: Any = {"num_workers": workers, "persistent_workers": workers > 0}
    if workers:
        options["multiprocessing_context"] = "fork"  # a rank of the harness would start a server to fork from
    loader = DataLoader(Noisy(), batch_size=8 // world, sampler=sampler, drop_last=True, **options)
    batches = holdfast.Batches(loader)
    state = {"model": model, "optimizer": optimizer, "random": holdfast.RandomStreams(), "batches": batches}
    seen = []
    with holdfast.Checkpointer(root, deadline_s=60) as ck:
        step = ck.restore(state) or 0
        while step < STEPS:
            for samples, rows in batches:
                loss = model(rows).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                seen.append((samples.tolist(), loss.item().hex()))
                if step == SAVED:
                    ck.save(step, state).result()
                if hold and step == HELD_AT:
                    tell_parent("held")
                    dist.barrier(async_op=True)  # and none of the ranks ends before it is killed
                    torch.multiprocessing.Event().wait()
                if step == STEPS:
                    break
    return seen


def killed(root: Path, workers: int) -> None:
    victims = Victims(2, train, str(root), workers, True)
    try:
        assert victims.hear(DEADLINE_S) == ["held"] * 2
    finally:
        victims.kill()


@pytest.mark.timeout(300)
@pytest.mark.sliced(2)
@pytest.mark.parametrize("workers", [2, 0])
def test_a_killed_run_goes_on_amid_an_epoch_bit_for_bit(tmp_path: Path, workers: int) -> None:
    whole = run_ranks(2, train, str(tmp_path / "whole"), workers, False, deadline_s=DEADLINE_S)
    killed(tmp_path / "killed", workers)
    resumed = run_ranks(2, train, str(tmp_path / "killed"), workers, False, deadline_s=DEADLINE_S)
    assert [len(rank) for rank in whole] == [STEPS] * 2
    assert resumed == [rank[SAVED:] for rank in whole]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_another_number_of_ranks_goes_on_with_the_samples_that_are_left(tmp_path: Path) -> None:
    whole = run_ranks(2, train, str(tmp_path / "whole"), 0, False, deadline_s=DEADLINE_S)
    killed(tmp_path / "killed", 0)
    (alone,) = run_ranks(1, train, str(tmp_path / "killed"), 0, False, deadline_s=DEADLINE_S)
    expected = [sorted(first[0] + second[0]) for first, second in zip(*whole, strict=True)]
    assert [sorted(samples) for samples, _ in alone] == expected[SAVED:]
