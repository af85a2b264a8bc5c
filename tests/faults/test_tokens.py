"""A slice of the faults of resized vocabularies, and proof that their judge can say no."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from tests.faults.operations import Place, failing, fresh_folder, judge, killed
from tests.faults.row import LOST, SURVIVED, WRONG
from tests.faults.rows_tokens import RESIZES


@pytest.fixture(scope="module")
def whole() -> Iterator[Place]:
    with fresh_folder() as folder:
        yield Place(folder / "place", RESIZES["hf"], occupied=False)


@pytest.fixture
def place(whole: Place) -> Place:
    whole.reset()
    return whole


@pytest.mark.sliced(3)
@pytest.mark.parametrize("number", [18, 4, 10])
def test_a_resize_killed_at_a_system_call(place: Place, number: int) -> None:
    acknowledged = killed(place, number)
    assert acknowledged is False
    assert judge(place, acknowledged, "slice") == SURVIVED


@pytest.mark.sliced(2)
@pytest.mark.parametrize("number", [15, 3])
def test_a_resize_on_a_full_disk(place: Place, number: int) -> None:
    acknowledged = failing(errno.ENOSPC, place, number)
    assert acknowledged is False
    assert judge(place, acknowledged, "slice") == SURVIVED


def test_the_judge_can_say_no(place: Place) -> None:
    assert judge(place, True, "missing") == LOST
    place.work()
    file = place.target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert judge(place, True, "torn") == WRONG
    place.reset()
    assert judge(place, None, "another error") == WRONG
    touched = next((place.folder / "source").glob("model-*"))
    data = touched.read_bytes()
    touched.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert judge(place, False, "touched") != SURVIVED
    touched.write_bytes(data)
    assert judge(place, False, "as it was") == SURVIVED
