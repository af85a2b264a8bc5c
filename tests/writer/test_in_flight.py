"""Saves in flight: what their notes lack is counted as nothing."""

from __future__ import annotations

from pathlib import Path

from holdfast.storage.local import LocalStorage
from holdfast.writer.in_flight import InFlight, saves_in_flight
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import SaveStarted, WriterStatus
from tests.writer.two_hosts import ATTEMPT


def test_a_save_of_unknown_size_has_a_total_of_0(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_begun(SaveStarted(3, 2, None))
    assert saves_in_flight(LocalStorage(tmp_path)) == [InFlight(ATTEMPT, 3, 2, 0, 0, 0, "beginning")]


def test_a_save_of_unknown_world_has_the_writers_that_are_heard(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_begun(SaveStarted(3, None, 296))
    mailbox.post_status(0, WriterStatus(1, "writing", 50, 100))
    mailbox.post_status(1, WriterStatus(1, "writing", 0, 0))
    assert saves_in_flight(LocalStorage(tmp_path)) == [InFlight(ATTEMPT, 3, 2, 50, 296, 0, "writing")]


def test_an_attempt_that_has_not_begun_is_no_save(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    mailbox.post_status(0, WriterStatus(1, "waiting for the capture", 0, 100))
    assert saves_in_flight(LocalStorage(tmp_path)) == []
