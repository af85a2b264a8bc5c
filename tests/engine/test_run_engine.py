"""The engine of a run: its states, and what each of them saves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.engine import background_save
from holdfast.engine.memory_tier import MemoryState
from holdfast.engine.run_engine import RunState
from holdfast.storage.base import Storage
from holdfast.storage.memory import MemoryStorage


def state_of(checkpointer: holdfast.Checkpointer) -> RunState:
    return checkpointer._engine.state


def test_a_storage_of_one_process_saves_blocking() -> None:
    with holdfast.Checkpointer(MemoryStorage()) as checkpointer:
        assert state_of(checkpointer) is RunState.NEW
        handle = checkpointer.save(1, {"w": torch.ones(3)})
        assert handle.done() and handle.error is None
        assert state_of(checkpointer) is RunState.BLOCKING
        fresh = {"w": torch.zeros(3)}
        assert checkpointer.restore(fresh) == 1 and fresh["w"].tolist() == [1.0] * 3
        assert checkpointer.save(2, fresh).result().manifest.parent == 1
    assert state_of(checkpointer) is RunState.CLOSED
    with pytest.raises(holdfast.Unsupported, match="closed"):
        checkpointer.save(3, fresh)


def test_a_shared_storage_saves_in_the_background(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"note": 0}) is None
        assert state_of(checkpointer) is RunState.BACKGROUND
    assert state_of(checkpointer) is RunState.CLOSED
    checkpointer.close()  # twice does no harm


def test_a_restore_without_an_optimizer_creates_no_root(tmp_path: Path) -> None:
    root = tmp_path / "none"
    with holdfast.Checkpointer(root) as checkpointer:
        assert checkpointer.restore({"note": 0}) is None
        assert state_of(checkpointer) is RunState.NEW and not root.exists()


def test_without_memory_for_an_arena_saves_block(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path, arena_bytes=10) as checkpointer:
        with pytest.warns(holdfast.HoldfastWarning, match="saves block until they are written"):
            checkpointer.save(1, {"w": torch.ones(3)})
        assert state_of(checkpointer) is RunState.BLOCKING and checkpointer._engine.background is None
        assert checkpointer.save(2, {"w": torch.ones(3)}).result().manifest.parent == 1


def test_the_report_is_that_of_the_last_restore(tmp_path: Path) -> None:
    with holdfast.Checkpointer(MemoryStorage()) as checkpointer:
        assert checkpointer.last_report is None
        checkpointer.save(1, {"w": torch.ones(3)})
        checkpointer.restore({"w": torch.zeros(3)})
        assert checkpointer.last_report is not None and checkpointer.last_report.step == 1
        assert not checkpointer.last_report.is_partial


def test_a_run_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    events: list[holdfast.Event] = []
    with holdfast.Checkpointer(tmp_path / "mistyped", on_event=events.append) as checkpointer:
        checkpointer.restore({"w": torch.zeros(3)})
        checkpointer.save(1, {"w": torch.ones(3)}).result()
        checkpointer.restore({"w": torch.zeros(3)})
    (new,) = [event for event in events if event.name == "new run"]
    assert str(new) == f"new run: there is no checkpoint in {tmp_path / 'mistyped'}"


def test_a_note_alone_is_told_as_such(tmp_path: Path) -> None:
    class Noting(holdfast.RandomStreams):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.reshard_note = "all streams are new ones"

    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"random": holdfast.RandomStreams()}).result()
        with pytest.warns(holdfast.HoldfastWarning, match=r"^restored step 1; random: all streams are new ones$"):
            checkpointer.restore({"random": Noting()})


def test_a_wrong_call_drops_nothing_that_earlier_starts_captured(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result()
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.restore({"w": torch.zeros(3)}, step=1)
        memory = checkpointer._engine._memory
        assert memory.state is MemoryState.KEPT
        with pytest.raises(holdfast.InvalidArgument):
            checkpointer.save(-1, {"w": torch.ones(3)})
        assert memory.state is MemoryState.KEPT
        checkpointer.save(2, {"w": torch.ones(3)}).result()
        assert memory.state is MemoryState.DROPPED


def test_a_restore_that_raises_leaves_the_parent_of_the_next_save(tmp_path: Path) -> None:
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}).result()
        with pytest.raises(holdfast.Mismatch):
            checkpointer.restore({"other": torch.zeros(3)})
        assert checkpointer.save(2, {"w": torch.ones(3)}).result().manifest.parent == 1


@pytest.mark.parametrize("in_background", [False, True])
def test_a_removal_is_reported_after_the_publication_that_led_to_it(tmp_path: Path, in_background: bool) -> None:
    events: list[holdfast.Event] = []
    root: Path | Storage = tmp_path if in_background else MemoryStorage()
    with holdfast.Checkpointer(root, keep=holdfast.keep.last(1), on_event=events.append) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, {"w": torch.full((3,), float(step))}).result()
            told = [(event.name, event.step) for event in events if event.name in ("published", "removed")]
            assert told[-2:] == [("published", step), ("removed", step - 1)] or step == 1, "once the save is over"
    assert len(told) == 5


def test_a_close_says_what_it_waits_for_only_if_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[holdfast.Event] = []
    for step, is_slow in ((1, False), (2, True)):
        monkeypatch.setattr(background_save, "_QUIET_S", 0.3 if is_slow else 30.0, raising=False)
        events.clear()
        checkpointer = holdfast.Checkpointer(tmp_path, on_event=events.append)
        checkpointer.prepare({"w": torch.ones(3)})
        assert checkpointer._engine.background is not None
        writer = checkpointer._engine.background.writer
        assert writer is not None
        if is_slow:
            os.kill(writer.pid, signal.SIGSTOP)
            threading.Timer(0.8, os.kill, (writer.pid, signal.SIGCONT)).start()
        checkpointer.save(step, {"w": torch.full((3,), float(step))})
        checkpointer.close(60.0)
        assert [event.step for event in events if event.name == "published"] == [step]
        assert [str(event) for event in events if event.name == "closing"] == (
            ["step 2: closing: waiting up to 60 s until this step is published"] if is_slow else []
        )
