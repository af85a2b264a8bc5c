"""Events: their text, what is logged of them, and listeners that fail."""

from __future__ import annotations

import logging

import pytest

from holdfast.core.events import Event, log_event, safe_listener


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event("closing"), "closing"),
        (Event("planned", 0), "step 0: planned"),
        (Event("skipped", 7, detail="busy"), "step 7: skipped: busy"),
        (Event("captured", 7, bytes=2_500_000, seconds=0.5), "step 7: captured 2.50 MB in 0.50 s"),
        (Event("written", 7, bytes=99_999_999), "step 7: written 100.00 MB"),
        (Event("written", 7, bytes=100_000_000), "step 7: written 0.10 GB"),
        (Event("written", 7, bytes=100_000_000, seconds=1.0), "step 7: written 0.10 GB in 1.00 s (0.10 GB/s)"),
        (Event("written", 7, bytes=3_000_000_000, seconds=1.5), "step 7: written 3.00 GB in 1.50 s (2.00 GB/s)"),
    ],
)
def test_the_text_of_an_event(event: Event, text: str) -> None:
    assert str(event) == text


def test_the_fields_of_an_event_make_it_again() -> None:
    event = Event("written", 3, 1, 10, 0.5, "detail", 17.0)
    assert event.fields() == {
        "name": "written", "step": 3, "rank": 1, "bytes": 10, "seconds": 0.5, "detail": "detail", "at": 17.0,
    }  # fmt: skip
    assert Event(**event.fields()) == event


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (logging.DEBUG, ["planned", "captured", "written", "skipped", "waited", "discovered", "cleaned", "arena"]),
        (
            logging.INFO,
            ["published", "restored", "new run", "preempted", "removed", "set aside", "went back", "closing"],
        ),
        (logging.WARNING, ["failed", "no identity", "unrestored"]),
    ],
)
def test_the_level_of_an_event(level: int, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "holdfast"):
        for name in names:
            log_event(Event(name, 5))
    assert [(record.name, record.levelno, record.getMessage()) for record in caplog.records] == [
        ("holdfast", level, f"step 5: {name}") for name in names
    ]


def test_a_listener_that_fails_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        raise RuntimeError("my own bug")

    with caplog.at_level(logging.DEBUG, "holdfast"):
        safe_listener(listen)(Event("published", 5))
    assert [event.step for event in heard] == [5]
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "step 5: published" in record.getMessage()
    assert record.exc_info is not None and "my own bug" in str(record.exc_info[1])


def test_an_event_is_of_rank_0_unless_it_says_otherwise() -> None:
    assert Event("closing").rank == 0
