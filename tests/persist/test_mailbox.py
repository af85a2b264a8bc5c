"""Waiting for the writers of other ranks: one deadline for all of a save."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast.core.errors import PeerFailed
from holdfast.persist import mailbox as mail
from holdfast.persist.mailbox import Mailbox, Watch
from holdfast.storage.local import LocalStorage


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    box = Mailbox(LocalStorage(tmp_path), ".attempt-0123456789abcdef")
    box.make()
    return box


@pytest.mark.parametrize(("waited_s", "expected_s"), [(0.0, 4.0), (1.0, 3.0), (3.9, 2.0), (60.0, 2.0)])
def test_the_deadline_counts_from_the_beginning_of_the_save(
    mailbox: Mailbox, waited_s: float, expected_s: float
) -> None:
    before = time.monotonic()
    watch = Watch(mailbox, 4.0, 60.0, time.monotonic() - waited_s)
    after = time.monotonic()  # the watch began at some moment between the two, however far apart they are
    assert watch._end - after - 0.01 <= expected_s <= watch._end - before + 0.01


def test_who_comes_late_still_hears_what_is_there(mailbox: Mailbox) -> None:
    mailbox.post(mail.OUTCOME, {"error": None})
    watch = Watch(mailbox, 0.1, 60.0, time.monotonic() - 60)
    watch.wait(lambda names: mail.OUTCOME in names, lambda names: [0], "the outcome")
    with pytest.raises(PeerFailed, match="not there after"):
        watch.wait(lambda names: False, lambda names: [0], "what never comes")
