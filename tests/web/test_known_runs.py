"""Runs in memory: many small ones all, large ones within a number of steps; the list reads no run twice in a moment."""

import threading
import time

from holdfast.checkpoint.catalog import Catalog
from holdfast.web import known_runs, run_records
from holdfast.web.known_runs import KnownRuns
from holdfast.web.run_records import NO_ANSWER
from holdfast.web.served_runs import ServedRoots
from tests.web import sample_runs
from tests.web.gated_storage import GatedRoots


def test_memory_is_bounded_and_the_list_complete(tmp_path, monkeypatch):
    for name in "abcde":
        sample_runs.light_steps(tmp_path / name, range(1, 11))
    monkeypatch.setattr(known_runs, "_MOST_STEPS", 25)
    scans = []
    scan = Catalog.scan

    def counted(catalog):
        scans.append(catalog)
        scan(catalog)

    monkeypatch.setattr(Catalog, "scan", counted)
    known = KnownRuns(ServedRoots([str(tmp_path)]))
    assert [run["steps"] for run in known.summaries()] == [10] * 5
    assert (len(scans), sum(len(records.rows) for records in known._records.values())) == (5, 20)
    assert [run["name"] for run in known.summaries()] == list("abcde")
    assert len(scans) == 5
    first = known.summaries()[0]["id"]
    assert len(known.records(first).rows) == 10
    assert len(scans) == 6


def test_a_run_that_is_looked_at_is_up_to_date_in_the_list(tmp_path, monkeypatch):
    sample_runs.light_steps(tmp_path / "a", [1])
    monkeypatch.setattr(run_records, "_LOCAL_S", 0.0)
    known = KnownRuns(ServedRoots([str(tmp_path / "a")]))
    assert known.summaries()[0]["newest"] == 1
    sample_runs.light_steps(tmp_path / "a", [2])
    assert known.summaries()[0]["newest"] == 2


def test_a_slow_storage_holds_up_no_other_run_of_the_list(tmp_path, monkeypatch):
    monkeypatch.setattr(known_runs, "_PATIENCE_S", 0.3)
    for name in "abc":
        sample_runs.light_steps(tmp_path / name, [1, 2])
    roots = GatedRoots(tmp_path, "a")
    known = KnownRuns(roots)
    roots.storage("a").close()
    began = time.monotonic()
    found = known.summaries()
    assert time.monotonic() - began < 10
    assert [(run["steps"], run["problem"]) for run in found] == [(None, NO_ANSWER), (2, None), (2, None)]
    assert len([thread for thread in threading.enumerate() if thread.name == "holdfast-page-list"]) == 1
    known.summaries()
    assert len([thread for thread in threading.enumerate() if thread.name == "holdfast-page-list"]) == 1
    roots.storage("a").gate.set()
    monkeypatch.setattr(known_runs, "_PATIENCE_S", 30.0)
    assert [run["steps"] for run in known.summaries()] == [2, 2, 2]
