"""Retention as gc and the next save see it; saves in flight with silent and failed ranks."""

import threading
import time

import pytest

from holdfast.checkpoint import retention
from holdfast.core.errors import StorageError
from holdfast.keep import parse
from holdfast.storage.local import LocalStorage
from holdfast.web import run_view
from holdfast.web.run_view import FlightWatch, retention_fields, run_fields, run_summary
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import Failure, RankReport, SaveStarted, WriterStatus
from tests.web import sample_runs
from tests.web.gated_storage import GatedStorage
from tests.web.test_run_records import records_of


def test_the_preview_is_what_retention_decides(samples):
    records = records_of(samples / "branches")
    found = retention_fields(records)
    assert found["policy"] == "last(2) | every(20)"
    storage = records.run.storage
    policy = retention.saved_policy(storage)
    assert policy is not None
    decisions = retention.decide(storage, policy)
    assert [(row["folder"], row["keep"]) for row in found["rows"]] == [(d.entry.folder, d.stays) for d in decisions]
    assert [row["folder"] for row in found["rows"] if not row["keep"]] == ["step-000000000010"]


def test_the_next_save_deletes_what_is_announced(tmp_path):
    sample_runs.light_steps(tmp_path, [10, 20, 30])
    retention._save_policy(LocalStorage(tmp_path), parse("last(3) | best(1, 'loss', 'max')"))
    announced = retention_fields(records_of(tmp_path))["next"]
    assert announced == []  # the first has the largest loss, the others are among the last three
    retention._save_policy(LocalStorage(tmp_path), parse("last(2)"))
    found = retention_fields(records_of(tmp_path))
    assert found["next"] == ["step-000000000010", "step-000000000020"]
    sample_runs.light_steps(tmp_path, [40])
    outcome = retention.apply(LocalStorage(tmp_path), parse("last(2)"), committed=40)
    assert [f"step-{step:012d}" for step in outcome.removed] == found["next"]


@pytest.mark.parametrize(
    ("steps", "coming", "gone"),
    [
        ([10], 11, []),  # nothing is known of the distance
        ([10, 20, 30, 40], 50, [10, 30]),
        ([100, 200, 210, 220], 230, [210]),  # the usual distance, not the first or the mean
        ([5, 10, 60, 110, 160], 210, [5, 10, 110]),
        ([50, 100, 150, 200, 210, 220], 230, [50, 150, 210]),  # of older steps every 50th is left
    ],
)
def test_the_next_step_is_assumed_by_the_usual_distance(tmp_path, steps, coming, gone):
    """The preview names the step that it assumes, and a save of that very step deletes what it announced."""
    policy = parse("last(2) | every(20)")
    sample_runs.light_steps(tmp_path, steps)
    retention._save_policy(LocalStorage(tmp_path), policy)
    found = retention_fields(records_of(tmp_path))
    assert (found["next_step"], found["next"]) == (coming, [f"step-{step:012d}" for step in gone])
    sample_runs.light_steps(tmp_path, [coming])
    assert retention.apply(LocalStorage(tmp_path), policy, committed=coming).removed == gone


def test_an_empty_run_has_no_next_step(tmp_path):
    retention._save_policy(LocalStorage(tmp_path), parse("last(2)"))
    found = retention_fields(records_of(tmp_path))
    assert (found["policy"], found["next_step"], found["next"]) == ("last(2)", None, [])


def test_a_tag_that_cannot_be_read_is_a_problem(tmp_path):
    sample_runs.light_steps(tmp_path, [10])
    retention._save_policy(LocalStorage(tmp_path), parse("last(1)"))
    (tmp_path / ".tags").mkdir(mode=0o700)
    (tmp_path / ".tags" / "best").write_bytes(b"{")
    records = records_of(tmp_path)
    assert "best" in retention_fields(records)["problem"]
    assert "best" in run_fields(records)["problem"]


def test_a_run_without_steps_has_all_fields(tmp_path):
    records = records_of(tmp_path)
    fields = run_fields(records)
    assert (fields["steps"]["folder"], fields["layout_axes"], fields["config"]) == ([], None, None)
    assert run_summary(records)["newest"] is None


def flight(tmp_path, world=3):
    storage = LocalStorage(tmp_path)
    mailbox = Mailbox(storage, ".attempt-" + "0" * 16)
    mailbox.make()
    mailbox.post_host("gpu7")
    mailbox.post_begun(SaveStarted(50, world, 300))
    return storage, mailbox


def test_every_rank_of_a_save_in_flight_is_shown(tmp_path, monkeypatch):
    storage, mailbox = flight(tmp_path)
    mailbox.post_status(0, WriterStatus(1, "writing", 40, 100))
    mailbox.post_status(2, WriterStatus(1, "<b>", 10, 100))
    watch = FlightWatch(storage)
    (found,) = watch.fields()
    assert (found["step"], found["written"], found["total"], found["world"]) == (50, 50, 300, 3)
    assert [(rank["rank"], rank["host"], rank["written"], rank["problem"]) for rank in found["ranks"]] == [
        (0, "gpu7", 40, None), (1, None, 0, None), (2, None, 10, None)
    ]  # fmt: skip
    monkeypatch.setattr(run_view, "_SILENT_S", 0.2)
    time.sleep(0.3)
    mailbox.post_status(0, WriterStatus(2, "writing", 40, 100))
    mailbox._post("report-1", RankReport("plan", failure=Failure.of(StorageError("disk full"))).note())
    ranks = watch.fields()[0]["ranks"]
    assert (ranks[0]["problem"], ranks[1]["problem"]) == (None, "StorageError: disk full")
    assert "silent" in ranks[2]["problem"]
    mailbox.discard()
    assert watch.fields() == []


def test_notes_of_hostile_numbers_are_bounded(tmp_path):
    storage, mailbox = flight(tmp_path, world=2**60)
    mailbox._post("status-99999999999999999999", b"{}")
    mailbox._post("status-1", b'{"beat":1e999}')
    found = FlightWatch(storage).fields()
    assert len(found[0]["ranks"]) <= 4096


def test_saves_in_flight_of_a_slow_storage_hold_up_one_thread(tmp_path):
    flight(tmp_path / "run")
    storage = GatedStorage(tmp_path / "run")
    watch = FlightWatch(storage)
    known = watch.fields()
    storage.close()
    looking = threading.Thread(target=watch.fields)
    looking.start()
    assert storage.waiting.wait(30)
    asked = []
    asking = threading.Thread(target=lambda: asked.append(watch.fields()))
    asking.start()
    asking.join(10)
    assert asked == [known] and len(known) == 1
    storage.gate.set()
    looking.join(30)
