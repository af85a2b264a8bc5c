"""Outputs of conversions and merges: what is planned is written and published, and a failure changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import keep
from holdfast.checkpoint import retention
from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.publish_output import Hold, no_watch, publish_output
from holdfast.convert.sinks.base import Output
from holdfast.core.errors import InvalidArgument
from holdfast.core.names import step_folder
from holdfast.core.ranks import Ranks, SingleProcess
from holdfast.core.terminal import Progress
from holdfast.sources import open_source
from holdfast.storage.local import LocalStorage
from tests.convert.states import save


class Note:
    """An output of one small file."""

    step = None

    def __init__(self, text: bytes, fails: bool = False) -> None:
        self.output = Output((), lambda name, reports: {"note.txt": text})
        self.fails = fails

    def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> list[BlockReport]:
        if self.fails:
            raise OSError("the disk is full")
        return []


def publish(destination: Path, note: Note, source: Checkpoint | None = None) -> None:
    def plan(target: DestinationFolder, hold: Hold) -> Note:
        if source is not None:
            hold(source)
        return note

    planned, target = publish_output(plan, destination, SingleProcess(), no_watch, force=False)
    assert planned is note and target.path == str(destination)


def test_output_is_published(tmp_path: Path) -> None:
    publish(tmp_path / "out", Note(b"text"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "note.txt").read_bytes() == b"text"


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is full"):
        publish(tmp_path / "out", Note(b"text", fails=True))
    assert list(tmp_path.iterdir()) == []


def test_source_is_held_while_the_output_is_written(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(tmp_path / "run" / step_folder(step), {"x": {"w": torch.ones(2)}}, step=step)

    class Busy(Note):
        def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> list[BlockReport]:
            assert retention.apply(LocalStorage(tmp_path / "run"), keep.last(1)).busy == [1]
            return []

    publish(tmp_path / "out", Busy(b"text"), open_source(tmp_path / "run" / step_folder(1)))
    assert retention.apply(LocalStorage(tmp_path / "run"), keep.last(1)).removed == [1]


def test_source_is_never_replaced(tmp_path: Path) -> None:
    save(tmp_path / "run")
    source = open_source(tmp_path / "run")
    with pytest.raises(InvalidArgument, match="the source is never modified"):
        publish(Path(source.path), Note(b"text"), source)
