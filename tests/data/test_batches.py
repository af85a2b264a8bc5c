"""The position in a plain DataLoader: resumed anywhere in an epoch, with nothing drawn from the global streams."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.data.batches import Batches

COUNT = 23


@pytest.fixture(autouse=True)
def own_streams() -> Any:
    streams = holdfast.RandomStreams()
    before = streams.state_dict()
    yield
    streams.load_state_dict(before)


class Silent(Dataset[torch.Tensor]):
    """Samples that draw nothing."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        self.read.append(int(index))
        return torch.tensor(index)


class Noisy(Dataset[torch.Tensor]):
    """Samples with noise of all three streams."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *noise], dtype=torch.float64)


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), **{"batch_size": 4, "shuffle": True, **options})


def weighted(**options: Any) -> DataLoader[Any]:
    return plain(shuffle=False, sampler=WeightedRandomSampler([1.0] * COUNT, 40), **options)


def subset(**options: Any) -> DataLoader[Any]:
    return plain(shuffle=False, sampler=SubsetRandomSampler(range(17)), **options)


def own_batches(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 5, drop_last=True), **options)


def one_by_one(**options: Any) -> DataLoader[Any]:
    return plain(batch_size=None, **options)


def distributed(**options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(Noisy(), num_replicas=2, rank=1, seed=5)
    return plain(shuffle=False, sampler=sampler, **options)


LOADERS = [plain, weighted, subset, own_batches, one_by_one, distributed]


def steps(batches: Batches, count: int) -> Iterator[tuple[list[Any], float]]:
    """Train: every step has a batch, and a number that the model draws."""
    done = 0
    while done < count:
        for batch in batches:
            done += 1
            yield batch.tolist(), float(torch.rand(()))
            if done == count:
                break


def start(loader: DataLoader[Any]) -> tuple[Batches, dict[str, Any]]:
    batches = Batches(loader)
    return batches, {"random": holdfast.RandomStreams(), "batches": batches}


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("stop", [3, 5, 6])
def test_a_resumed_run_has_the_batches_and_numbers_of_one_that_never_stopped(
    tmp_path: Path, make: Any, stop: int
) -> None:
    torch.manual_seed(11)
    batches, state = start(make())
    expected = []
    for number, step in enumerate(steps(batches, 16), 1):
        expected.append(step)
        if number == stop:
            holdfast.save(tmp_path / "s", state)
    torch.manual_seed(11)
    batches, state = start(make())
    holdfast.load(tmp_path / "s", state)
    assert list(steps(batches, 16 - stop)) == expected[stop:]
    assert order_of(expected[: len(batches)]) != order_of(expected[len(batches) : 2 * len(batches)]), "epochs differ"


def order_of(trained: list[tuple[list[Any], float]]) -> list[float]:
    return [float(value) for batch, _ in trained for value in np.array(batch).reshape(-1, 4)[:, 0]]


@pytest.mark.sliced(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("persistent", [False, True])
def test_transforms_in_workers_draw_by_batch(tmp_path: Path, persistent: bool) -> None:
    def resumed(workers: int, keep_workers: bool) -> list[Any]:
        batches, state = start(plain(num_workers=workers, persistent_workers=keep_workers))
        holdfast.load(tmp_path / "s", state)
        return list(steps(batches, 6))

    batches, state = start(plain(num_workers=2, persistent_workers=persistent))
    expected = []
    for number, step in enumerate(steps(batches, 9), 1):
        expected.append(step)
        if number == 3:
            holdfast.save(tmp_path / "s", state)
    noise = [row[1:] for batch, _ in expected for row in batch]
    assert len({str(row) for row in noise}) == len(noise), "no two samples have the same noise"
    assert resumed(2, persistent) == expected[3:]
    assert resumed(1, False) == expected[3:], "the number of workers changes nothing"


def test_nothing_is_read_and_drawn_for_batches_that_were_used() -> None:
    dataset = Silent()
    batches = Batches(DataLoader(dataset, batch_size=4, shuffle=True))
    batches.load_state_dict({**batches.state_dict(), "epoch": 2, "used": 4})
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = holdfast.RandomStreams().state_dict()
    iterator = iter(batches)
    next(iterator)
    after = holdfast.RandomStreams().state_dict()
    assert torch.equal(before["torch"], after["torch"])
    assert before["python"] == after["python"]
    assert len(dataset.read) == 4


def test_a_step_saved_at_the_last_batch_ends_the_epoch_once_more() -> None:
    batches = Batches(plain())
    iterator = iter(batches)
    for _ in range(len(batches)):
        next(iterator)
    state = batches.state_dict()
    assert (state["epoch"], state["finished"]) == (0, True)
    resumed = Batches(plain())
    resumed.load_state_dict(state)
    assert list(resumed) == []
    assert (resumed.epoch, resumed.used) == (1, 0)
    assert len(list(resumed)) == len(resumed) == 6


def test_a_loop_that_was_left_goes_on_and_end_epoch_does_not() -> None:
    batches = Batches(plain())
    order = [row[0] for batch in Batches(plain()) for row in batch.tolist()]
    seen = []
    for batch in batches:
        seen += [row[0] for row in batch.tolist()]
        if batches.used == 2:
            break
    seen += [row[0] for batch in batches for row in batch.tolist()]
    assert seen == order
    next(iter(batches))
    batches.end_epoch()
    assert (batches.epoch, batches.used, len(list(batches))) == (2, 0, 6)


def test_the_seed_of_the_program_makes_the_order_and_a_restore_takes_over_the_saved_one() -> None:
    def order(batches: Batches) -> list[float]:
        return [row[0] for batch in batches for row in batch.tolist()]

    torch.manual_seed(1)
    first, given = order(Batches(plain())), order(Batches(plain(), seed=9))
    generated = order(Batches(plain(generator=torch.Generator().manual_seed(9))))
    saved = Batches(plain()).state_dict()
    torch.manual_seed(2)
    assert order(Batches(plain())) != first
    assert order(Batches(plain(), seed=9)) == given == generated
    resumed = Batches(plain())
    resumed.load_state_dict(saved)
    assert order(resumed) == first


def test_ranks_that_are_seeded_differently_have_one_position() -> None:
    positions = []
    for rank in range(2):
        torch.manual_seed(rank)
        sampler = DistributedSampler(Noisy(), num_replicas=2, rank=rank, seed=3)
        positions.append(Batches(plain(shuffle=False, sampler=sampler)).state_dict())
    assert positions[0] == positions[1]


def at(used: int, **changes: Any) -> dict[str, Any]:
    return {**Batches(plain(shuffle=False, sampler=sampler_of(2))).state_dict(), "used": used, **changes}


def sampler_of(world: int) -> DistributedSampler[Any]:
    return DistributedSampler(Noisy(), num_replicas=world, rank=0)


def test_another_number_of_ranks_goes_on_with_the_same_samples() -> None:
    same = Batches(DataLoader(Noisy(), batch_size=8, sampler=sampler_of(1)))
    same.load_state_dict(at(2))
    assert same.used == 2
    with pytest.warns(
        holdfast.HoldfastWarning, match="saved with 8 samples a step, now 4: goes on after the 16 samples"
    ):
        smaller = Batches(DataLoader(Noisy(), batch_size=4, sampler=sampler_of(1)))
        smaller.load_state_dict(at(2))
    assert smaller.used == 4
    finished = Batches(DataLoader(Noisy(), batch_size=5, sampler=sampler_of(1)))
    finished.load_state_dict(at(3, finished=True))
    assert list(finished) == []


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (at(1, batch_samples=7), "1 batches of 7 samples on 1 ranks were used of epoch 0; a batch has 4 samples now"),
        (at(1, batch_samples=0), r"of \? samples on 1 ranks"),
        (at(1, samples=24), "saved amid epoch 0 of 24 samples, and the dataset has 23 now"),
        ({"epoch": 1}, "batch_samples, finished, samples, seed, used, world: not a state that Batches saved"),
    ],
)
def test_a_position_among_other_samples_is_refused(state: dict[str, Any], error: str) -> None:
    batches = Batches(plain())
    with pytest.raises(holdfast.Mismatch, match=error):
        batches.load_state_dict(state)
    assert (batches.epoch, batches.used) == (0, 0)


def test_batches_of_unknown_size_go_on_with_as_many_ranks_only() -> None:
    batches = Batches(DataLoader(Noisy(), batch_sampler=[[0, 1], [2], [3, 4, 5]]))
    state = {**batches.state_dict(), "used": 1}
    batches.load_state_dict(state)
    assert [len(batch) for batch in batches] == [1, 3]
    with pytest.raises(holdfast.Mismatch, match="on 2 ranks were used"):
        batches.load_state_dict({**state, "world": 2})


def test_positions_of_each_rank_are_refused_elsewhere() -> None:
    with pytest.raises(holdfast.Mismatch, match="restore on as many ranks"):
        Batches(plain()).holdfast_reshard({(0,): {}, (1,): {}}, 0, 1)


def test_a_restore_amid_an_iteration_is_noticed() -> None:
    batches = Batches(plain())
    state = batches.state_dict()
    with pytest.raises(holdfast.InvalidArgument, match="leave its loop, then iterate"):
        for _ in batches:
            batches.load_state_dict(state)
    assert (batches.epoch, batches.used) == (0, 0)
    with pytest.raises(holdfast.InvalidArgument, match="iterated again"):
        for _ in batches:
            next(iter(batches))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Unknown(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())

    def __len__(self) -> int:
        return COUNT


class Odd(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(COUNT).tolist())


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


# torchdata calls a function of torch that torch has deprecated.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_of_torchdata_with_a_generator_of_its_own_goes_on(tmp_path: Path) -> None:
    def begin() -> tuple[Any, dict[str, Any]]:
        torch.manual_seed(11)
        loader = StatefulDataLoader(Noisy(), 4, sampler=sampler_of(1), generator=torch.Generator())
        return loader, {"random": holdfast.RandomStreams(), "loader": loader}

    loader, state = begin()
    expected = []
    for number, batch in enumerate(loader, 1):
        expected.append((batch.tolist(), float(torch.rand(()))))
        if number == 2:
            holdfast.save(tmp_path / "s", state)
    loader, state = begin()
    holdfast.load(tmp_path / "s", state)
    assert [(batch.tolist(), float(torch.rand(()))) for batch in loader] == expected[2:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_loaders_that_cannot_go_on_are_refused_by_name() -> None:
    for loader, error in [
        (DataLoader(Stream()), "Stream is an IterableDataset.*StatefulDataLoader"),
        (plain(shuffle=False, sampler=Unknown()), "the order of Unknown is not known.*set_epoch"),
        (plain(shuffle=False, sampler=Odd(Noisy())), "the order of Odd is not known"),
        (OwnLoader(Noisy()), "OwnLoader.: has an __iter__ of its own"),
        (StatefulDataLoader(Noisy()), "StatefulDataLoader.: keeps its position itself"),
        ([1, 2], "list.: give a torch.utils.data.DataLoader"),
    ]:
        with pytest.raises(holdfast.HoldfastError, match=error):
            Batches(loader)


def test_a_plain_loader_in_a_state_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(holdfast.Unsupported, match=r"loader: .*it keeps no position: save holdfast\.Batches\(loader\)"):
        holdfast.save(tmp_path / "s", {"loader": plain()})


def test_the_loader_itself_is_left_as_it_is() -> None:
    loader = plain(num_workers=0)
    before = dict(vars(loader))
    list(Batches(loader))
    assert vars(loader) == before
    assert len(list(loader)) == 6
