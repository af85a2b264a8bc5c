"""Random streams of every library go on where they were: on the same mesh exactly, on another one reported."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from holdfast.layout.coordinates import CoordinateChange
from tests.dist.harness import run_ranks


def draws() -> list[float]:
    return [random.gauss(0, 1), float(np.random.standard_normal()), float(np.random.rand()), float(torch.randn(()))]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)
    draws()  # gauss and standard_normal keep a second number


@pytest.fixture(autouse=True)
def own_streams() -> Any:
    streams = holdfast.RandomStreams()
    before = streams.state_dict()
    yield
    streams.load_state_dict(before)


def test_all_streams_go_on_bit_for_bit(tmp_path: Path) -> None:
    seed(3)
    holdfast.save(tmp_path / "s", {"rng": holdfast.RandomStreams()})
    expected = [draws() for _ in range(3)]
    seed(4)
    report = holdfast.load(tmp_path / "s", {"rng": holdfast.RandomStreams()})
    assert [draws() for _ in range(3)] == expected
    assert not report.notes


def test_late_streams_are_set_by_apply_and_saved_as_loaded_before(tmp_path: Path) -> None:
    seed(3)
    holdfast.save(tmp_path / "s", {"rng": holdfast.RandomStreams()})
    expected = draws()
    seed(4)
    late = holdfast.RandomStreams(late=True)
    holdfast.load(tmp_path / "s", {"rng": late})
    other = draws()
    assert other != expected
    holdfast.save(tmp_path / "again", {"rng": late})
    late.apply()
    assert draws() == expected
    after = draws()
    late.apply()  # once only
    assert draws() != after
    holdfast.load(tmp_path / "again", {"rng": holdfast.RandomStreams()})
    assert draws() == expected


def save_two(path: str) -> None:
    torch.manual_seed(dist.get_rank())
    holdfast.save(path, {"rng": holdfast.RandomStreams()})


def test_streams_that_wait_are_saved_as_those_of_the_present_mesh(tmp_path: Path) -> None:
    run_ranks(2, save_two, str(tmp_path / "two"))
    late = holdfast.RandomStreams(late=True)
    report = holdfast.load(tmp_path / "two", {"rng": late})
    assert any("no rank goes on with those of rank 1" in note for note in report.notes)
    holdfast.save(tmp_path / "one", {"rng": late})
    again = holdfast.load(tmp_path / "one", {"rng": holdfast.RandomStreams(late=True)})
    assert not again.notes, "one rank saved, and one loaded"


def test_another_generator_of_numpy_s_global_stream(tmp_path: Path) -> None:
    stream: Any = np.random
    before = stream.get_bit_generator()
    try:
        stream.set_bit_generator(np.random.PCG64(7))
        holdfast.save(tmp_path / "s", {"rng": holdfast.RandomStreams()})
        expected = np.random.rand(3)
        np.random.rand(5)
        holdfast.load(tmp_path / "s", {"rng": holdfast.RandomStreams()})
        assert np.array_equal(np.random.rand(3), expected)
    finally:
        stream.set_bit_generator(before)


def test_a_state_of_something_else_is_refused() -> None:
    seed(3)
    expected = draws()
    seed(3)
    other = torch.Generator().manual_seed(4).get_state()
    with pytest.raises(holdfast.Mismatch, match="not a state that RandomStreams saved"):
        holdfast.RandomStreams().load_state_dict({"torch": other})
    assert draws() == expected, "no stream was set"


def _alone_then_together(root: str, seeds: tuple[int, ...]) -> tuple[list[float], tuple[str, ...]]:
    seed(seeds[dist.get_rank()])
    report = holdfast.load(root, {"rng": holdfast.RandomStreams()})
    return draws(), report.notes


@pytest.mark.sliced(3)
@pytest.mark.parametrize(("seeds", "equal"), [((5, 6, 7), ()), ((5, 5, 5), (0, 1, 2)), ((5, 6, 6), (1, 2))])
def test_what_one_process_saved_goes_on_as_the_program_seeds_ranks(
    tmp_path: Path, seeds: tuple[int, ...], equal: tuple[int, ...]
) -> None:
    """Rank 0 goes on; ranks that are seeded alike draw the same numbers, and others do not."""
    seed(3)
    holdfast.save(tmp_path / "s", {"rng": holdfast.RandomStreams()})
    expected = draws()
    found = run_ranks(3, _alone_then_together, str(tmp_path / "s"), seeds)
    assert found == run_ranks(3, _alone_then_together, str(tmp_path / "s"), seeds)
    drawn = [own for own, _ in found]
    assert drawn[0] == expected
    for one in range(3):
        for other in range(one):
            same = one in equal and other in equal
            assert all((a == b) == same for a, b in zip(drawn[one], drawn[other], strict=True)), (one, other)
    words = "all ranks go on with" if len(equal) == 3 else "others begin with new ones, derived from those, of python"
    assert all(len(notes) == 1 and words in notes[0] for _, notes in found)


def _saved(root: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> list[float]:
    """Streams that differ along dp, and are the same along tp."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    seed(100 + mesh.get_local_rank("dp"))
    holdfast.save(root, {"rng": holdfast.RandomStreams()}, mesh=mesh)
    return draws()


def _loaded(root: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> tuple[list[float], tuple[str, ...]]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    seed(dist.get_rank())
    report = holdfast.load(root, {"rng": holdfast.RandomStreams()}, mesh=mesh)
    return draws(), report.notes


@pytest.mark.full
def test_every_rank_goes_on_on_the_same_mesh_and_another_one_is_reported(tmp_path: Path) -> None:
    root, names = str(tmp_path / "s"), ("dp", "tp")
    saved = run_ranks(4, _saved, root, (2, 2), names)
    assert saved[0] == saved[1] != saved[2] == saved[3]
    assert run_ranks(4, _loaded, root, (2, 2), names) == [(drawn, ()) for drawn in saved]
    one, two = run_ranks(2, _loaded, root, (2, 1), names)
    assert (one[0], two[0]) == (saved[0], saved[2])
    assert "rng: saved with a world size of 4, loaded with 2: every rank goes on with streams that were" in one[1][0]
    more = run_ranks(6, _loaded, root, (3, 2), names)
    assert [drawn for drawn, _ in more[:4]] == saved
    assert more[4][0] == more[5][0] not in saved
    assert "loaded with 6: each rank goes on with the streams of its place; dp=2 had none and begin" in more[4][1][0]
    assert run_ranks(6, _loaded, root, (3, 2), names) == more


def test_a_load_on_fewer_ranks_names_the_streams_that_are_left(tmp_path: Path) -> None:
    root = str(tmp_path / "s")
    saved = run_ranks(2, _saved, root, (2,), ("dp",))
    ((drawn, notes),) = run_ranks(1, _loaded, root, (1,), ("dp",))
    assert drawn == saved[0]
    assert notes == (
        "rng: saved with a world size of 2, loaded with 1: each rank goes on with the streams of its place; no rank "
        "goes on with those of dp=1. From here on random draws (dropout, augmentation) differ from those of a run that "
        "stays on the mesh that saved; nothing else is affected",
    )


def test_a_note_names_the_first_few_streams_only() -> None:
    streams = holdfast.RandomStreams()
    states: dict[tuple[int, ...], Any] = {(rank,): streams.state_dict() | {"world": 9} for rank in range(9)}
    left = tuple(f"dp={rank}" for rank in range(1, 9))
    streams.load_state_dict(streams.holdfast_reshard_at(states, (0,), CoordinateChange(left)))
    assert "no rank goes on with those of dp=1, dp=2, dp=3, dp=4 and 4 more." in streams.reshard_note
