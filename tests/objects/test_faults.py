"""A slice of the fault table of object stores: every fault, at requests that are spread over a save and a load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.core.errors import StorageError
from holdfast.storage.objects.transfer import PART_BYTES
from tests.faults.row import SURVIVED
from tests.objects.faults import AGAIN, NEW, Arena, arena, load_with, save_with
from tests.objects.proxy import FAULTS, Plan
from tests.objects.server import Server

pytestmark = pytest.mark.sliced(3)


@pytest.fixture(scope="module")
def here(server: Server) -> Iterator[Arena]:
    with arena(server) as made:
        yield made


@pytest.mark.parametrize("fault", FAULTS)
def test_a_save_survives_a_bad_request(here: Arena, fault: str) -> None:
    for number in (2, 9) if fault == "drip" else range(1, 60, 12):
        assert save_with(here, fault, AGAIN, number) in (SURVIVED, None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_load_survives_a_bad_request(here: Arena, fault: str) -> None:
    for number in (1, 4) if fault == "drip" else range(1, 12, 3):
        assert load_with(here, fault, number) in (SURVIVED, None)


@pytest.mark.parametrize("number", [1, 10, 18])
def test_a_store_that_goes_away_fails_the_save_in_time_and_keeps_what_was_there(here: Arena, number: int) -> None:
    assert save_with(here, "503", NEW, number, 10_000, saves=True) == SURVIVED


@pytest.mark.parametrize("fault", ["500", "503", "lost reply", "reset"])
def test_an_upload_in_parts_survives_a_bad_request_or_fails_and_leaves_nothing(here: Arena, fault: str) -> None:
    direct, behind = here.storages()
    attempt = ".attempt-00000000000000aa"
    direct.begin(attempt)
    data = memoryview(bytes(range(256)) * ((PART_BYTES + 4096) // 256))
    done = 0
    for number in range(1, 6):  # begin, two parts, complete
        name = f"file-{number}"
        behind.create(attempt, name, data.nbytes)
        writer = behind.writer(attempt, name)
        plan = here.proxy.set(Plan(fault, number))
        try:
            writer.write(0, [data])
            writer.sync()
        except StorageError:
            writer.close()
            assert name not in direct.files(attempt)
        else:
            done += bool(plan.done)
            assert direct.read(attempt, name, data.nbytes) == data
        finally:
            here.proxy.set(Plan())
        writer.close()
    assert done >= 3, "most of these a store survives"
