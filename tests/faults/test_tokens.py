"""A slice of the faults of resized vocabularies, and proof that their judge can say no."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.row import LOST, SURVIVED, WRONG
from tests.faults.rows_tokens import Place, failing, files_of, judge, killed, places


@pytest.fixture(scope="module")
def copies() -> Iterator[Callable[[str], Path]]:
    with places() as copy:
        yield copy


@pytest.fixture(scope="module")
def whole(copies: Callable[[str], Path]) -> Place:
    place = Place(copies("hf"), "hf", {})
    place.resize()
    return Place(place.folder, "hf", files_of(place.folder / "made"))


@pytest.mark.sliced(3)
@pytest.mark.parametrize("number", [18, 4, 10])
def test_a_resize_killed_at_a_system_call(copies: Callable[[str], Path], whole: Place, number: int) -> None:
    place = Place(copies("hf"), "hf", whole.made)
    acknowledged = killed(place, number)
    assert acknowledged is False
    assert judge(place, files_of(whole.folder / "source"), acknowledged, "slice") == SURVIVED


@pytest.mark.sliced(2)
@pytest.mark.parametrize("number", [15, 3])
def test_a_resize_on_a_full_disk(copies: Callable[[str], Path], whole: Place, number: int) -> None:
    place = Place(copies("hf"), "hf", whole.made)
    acknowledged = failing(errno.ENOSPC, place, number)
    assert acknowledged is False
    assert judge(place, files_of(whole.folder / "source"), acknowledged, "slice") == SURVIVED


def test_the_judge_can_say_no(copies: Callable[[str], Path], whole: Place) -> None:
    source = files_of(whole.folder / "source")
    torn = Place(copies("hf"), "hf", whole.made)
    torn.resize()
    file = torn.folder / "made" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert judge(torn, source, True, "torn") == WRONG
    missing = Place(copies("hf"), "hf", whole.made)
    assert judge(missing, source, True, "missing") == LOST
    touched = Place(copies("hf"), "hf", whole.made)
    next((touched.folder / "source").glob("model-*")).write_bytes(b"")
    assert judge(touched, source, False, "touched") == WRONG
