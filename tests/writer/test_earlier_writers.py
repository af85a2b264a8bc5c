"""Writers of an earlier start: whose end is awaited, and how they are named."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

import pytest

from holdfast.core.errors import PeerFailed
from holdfast.storage.local import LocalStorage
from holdfast.writer import earlier_writers
from holdfast.writer.earlier_writers import dead_attempts, holders, wait_for_writers
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import Outcome, WriterStatus
from tests.writer.conftest import RUN
from tests.writer.two_hosts import ATTEMPT


def test_the_error_names_the_writers_processes_and_no_others(
    tmp_path: Path, orphan: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_writers, "_WARN_S", 0.1)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(PeerFailed) as raised:
        warnings.simplefilter("always")
        wait_for_writers(LocalStorage(tmp_path), RUN, 0.5, 60.0, look_at_storage=False)
    for text in (str(raised.value), str(caught[0].message)):
        assert f"`kill -9 {orphan[1]}`" in text and "pkill" not in text
        assert str(os.getpid()) not in re.findall(r"\d+", text.partition("kill -9")[2])


def test_writers_of_another_host_are_named_by_their_host(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    mailbox.post_status(0, WriterStatus(1))
    with pytest.raises(PeerFailed, match="host north; wait for them, or end them there"):
        wait_for_writers(LocalStorage(tmp_path), RUN, 0.3, 60.0, look_at_storage=True)


def test_an_attempt_with_an_outcome_is_dead_even_if_its_status_changes(tmp_path: Path, mailbox: Mailbox) -> None:
    mailbox.post_host("north")
    mailbox.post_status(0, WriterStatus(1))
    mailbox.post_outcome(Outcome())
    assert dead_attempts(LocalStorage(tmp_path), 60.0) == {mailbox.folder}


def test_an_attempt_without_a_mailbox_is_dead(tmp_path: Path) -> None:
    (tmp_path / ATTEMPT).mkdir()
    (tmp_path / ".attempt-of-somebody-else").mkdir()
    assert dead_attempts(LocalStorage(tmp_path), 60.0) == {ATTEMPT}


def test_who_holds_a_file_is_found_by_the_file(tmp_path: Path, orphan: tuple[str, int]) -> None:
    assert holders([Path(orphan[0])]) == [orphan[1]]
    assert holders([tmp_path, tmp_path / "absent"]) == []
