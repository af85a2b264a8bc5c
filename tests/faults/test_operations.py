"""A slice of the faults of adapters, quantized weights and programs."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from tests.faults.operations import Place, failing, fresh_folder, judge, killed
from tests.faults.row import SURVIVED
from tests.faults.rows_operations import OPERATIONS, UNFIT, refused
from tests.faults.rows_programs import ADDITION

ALL = {**OPERATIONS, ADDITION.name: ADDITION}


@pytest.fixture(scope="module")
def places() -> Iterator[Callable[[str], Place]]:
    with fresh_folder() as folder:
        known: dict[str, Place] = {}

        def find(name: str) -> Place:
            if name not in known:
                known[name] = Place(folder / str(len(known)), ALL[name], occupied=True)
            known[name].reset()
            return known[name]

        yield find


@pytest.mark.parametrize("number", [11, 20])
@pytest.mark.parametrize("name", ALL)
def test_an_operation_killed_at_a_system_call(places: Callable[[str], Place], name: str, number: int) -> None:
    place = places(name)
    acknowledged = killed(place, number)
    assert acknowledged is False
    assert judge(place, acknowledged, "slice") == SURVIVED


@pytest.mark.parametrize("number", [6, 17])
@pytest.mark.parametrize("name", ALL)
def test_an_operation_on_a_full_disk(places: Callable[[str], Place], name: str, number: int) -> None:
    place = places(name)
    acknowledged = failing(errno.ENOSPC, place, number)
    assert acknowledged is False
    assert judge(place, acknowledged, "slice") == SURVIVED


@pytest.mark.parametrize(("name", "unfit"), [(name, unfit) for name in UNFIT for unfit in UNFIT[name]])
def test_an_operation_on_inputs_that_do_not_fit(name: str, unfit: str) -> None:
    refused(name, unfit, occupied=True)
