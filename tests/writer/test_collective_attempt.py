"""An attempt of all ranks: rank 0 creates it, and discards it if any rank fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import StorageError
from holdfast.core.ranks import SingleProcess
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.writer.collective_attempt import collective_attempt
from holdfast.writer.in_flight import saves_in_flight
from holdfast.writer.messages import SaveStarted

FILES, BEGUN = [("a", 8)], SaveStarted(3, 1, 8)


class SecondOfTwo(SingleProcess):
    """Rank 1 of two, whose rank 0 has created the attempt or failed to."""

    rank, world = 1, 2

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def gather(self, value: Any) -> list[Any]:
        return [self._answer, value]


def refuse() -> None:
    raise StorageError("not now")


def attempt_at(root: Path, prepare: Callable[[], None] = lambda: None, ranks: Any = None) -> Any:
    return collective_attempt(ranks or SingleProcess(), LocalStorage(root), "step-000000000003", FILES, BEGUN, prepare)


def test_it_is_created_and_announced_while_it_is_written(tmp_path: Path) -> None:
    with attempt_at(tmp_path) as attempt:
        assert (tmp_path / attempt.name / "a").stat().st_size == 8
        (found,) = saves_in_flight(LocalStorage(tmp_path))
        assert (found.attempt, found.step, found.total) == (attempt.name, 3, 8)
        attempt.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000003"]


def test_it_is_discarded_when_the_writing_fails(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), attempt_at(tmp_path):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_created_if_it_must_not_begin(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="not now"), attempt_at(tmp_path, refuse):
        raise AssertionError("it began")
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_get_the_attempt_of_rank_0_and_leave_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded: list[str] = []
    monkeypatch.setattr(LocalStorage, "discard", lambda self, folder: discarded.append(folder))
    ranks = SecondOfTwo({"value": ".attempt-of-rank-0", "at": "collective_attempt"})
    with pytest.raises(ValueError, match="rank 1 fails"), attempt_at(tmp_path, refuse, ranks) as attempt:
        assert attempt.name == ".attempt-of-rank-0"
        (tmp_path / attempt.name).mkdir()
        raise ValueError("rank 1 fails")
    assert [path.name for path in tmp_path.iterdir()] == [".attempt-of-rank-0"] and discarded == []


def test_the_failure_of_rank_0_is_raised_on_every_rank(tmp_path: Path) -> None:
    ranks = SecondOfTwo({"error": ["StorageError", "not now"]})
    with pytest.raises(StorageError, match="rank 0: not now"), attempt_at(tmp_path, ranks=ranks):
        raise AssertionError("it began")


def test_a_storage_of_one_process_has_no_mailbox() -> None:
    storage = MemoryStorage()
    with collective_attempt(SingleProcess(), storage, "step-000000000003", FILES, BEGUN, lambda: None) as attempt:
        assert set(storage.files(attempt.name)) == {"a"}
