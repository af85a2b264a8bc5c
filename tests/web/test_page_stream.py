"""Events of a run: changed steps, metrics, saves in flight, the log; a page that never reads costs nothing."""

import contextlib
import json
import shutil
import socket
import time

import numpy as np

from holdfast.storage.local import LocalStorage
from holdfast.train.metrics import Metrics
from holdfast.web import page_stream, run_records
from holdfast.web.page_stream import RunFollower
from holdfast.web.run_view import FlightWatch
from tests.web import sample_runs
from tests.web.gated_storage import GatedRoots
from tests.web.running import running
from tests.web.test_run_records import records_of
from tests.web.test_run_view import flight


def follower_of(root):
    records = records_of(root)
    return records, RunFollower(records, FlightWatch(records.run.storage).fields)


def polled(records, follower):
    records.refresh(force=True)
    found = []
    for data in follower.poll():
        name, value = data.decode().strip().split("\n")
        found.append((name.removeprefix("event: "), json.loads(value.removeprefix("data: "))))
    return found


def test_steps_come_and_go(tmp_path):
    sample_runs.light_steps(tmp_path, [1, 2])
    records, follower = follower_of(tmp_path)
    assert polled(records, follower) == []
    sample_runs.write_step(tmp_path, 3, {"model": {"w": np.ones(2, np.float32)}}, metrics={"loss": 0.5, "none": None})
    shutil.rmtree(tmp_path / "step-000000000001")
    (name, value), *more = polled(records, follower)
    assert (name, value["removed"]) == ("run", ["step-000000000001"])
    assert [(gone["step"], gone["why"]) for gone in value["gone"]] == [
        (1, "removed by someone outside of Holdfast: the run has no rules that delete steps")
    ]
    logged = [(line["step"], line["kind"]) for event, line in more if event == "log"]
    assert logged == [(3, "published"), (1, "removed")]
    assert more[-1] == ("metrics", {"names": {"loss": {"step": [3], "value": [0.5]}}})
    assert value["retention"]["rows"] == [] and value["retention"]["policy"] is None
    assert [row["folder"] for row in value["changed"]["steps"]] == ["step-000000000003"]
    assert polled(records, follower) == []


def test_many_changes_ask_for_a_new_look(tmp_path, monkeypatch):
    monkeypatch.setattr(page_stream, "_MOST_ROWS", 20)
    sample_runs.light_steps(tmp_path, [1])
    records, follower = follower_of(tmp_path)
    sample_runs.light_steps(tmp_path, range(2, 30))
    assert [name for name, _ in polled(records, follower)] == ["reload"]


def test_metrics_and_marks_follow_the_run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    written = Metrics(folder / "metrics.jsonl")
    written.event("began", 0)
    written.step(1, loss=2.0)
    records, follower = follower_of(folder)
    written.step(2, loss=1.5)
    written.event("save", 2, stall_ms=3.0)
    events = dict(polled(records, follower))
    assert events["metrics"] == {"names": {"loss": {"step": [2], "value": [1.5]}}}
    assert (events["log"]["kind"], events["log"]["step"]) == ("save", 2)
    written.event("resumed", 1)
    written.step(2, loss=1.4)
    written.close()
    assert [name for name, _ in polled(records, follower)] == ["log", "log", "reload"]
    assert polled(records, follower) == []


def test_saves_in_flight_are_told_until_they_end(tmp_path):
    sample_runs.light_steps(tmp_path, [1])
    records, follower = follower_of(tmp_path)
    _, mailbox = flight(tmp_path)
    assert [name for name, _ in polled(records, follower)] == ["flights"]
    mailbox.discard()
    assert polled(records, follower) == [("flights", {"flights": []})]
    assert polled(records, follower) == []
    assert LocalStorage(tmp_path).exists()


def test_a_page_hears_of_a_new_step(tmp_path):
    """Over a connection, within seconds."""
    sample_runs.light_steps(tmp_path, [1])
    with running(tmp_path) as server, server.connect() as connection:
        run = server.get("/api/runs")["runs"][0]["id"]
        connection.sendall(f"GET /api/runs/{run}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = _until(connection, b"retry: 2000")
        assert b"Content-Type: text/event-stream" in received
        time.sleep(1.5)
        sample_runs.write_step(tmp_path, 2, {"model": {"w": np.ones(2, np.float32)}})
        assert b"step-000000000002" in _until(connection, b"step-000000000002")


def test_the_stream_of_an_unknown_run_says_so(server):
    answer = server.request("GET", "/api/runs/unknown/stream")
    assert b"event: reload" in answer.body


def _until(connection: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        part = connection.recv(65536)
        assert part, found
        found += part
    return found


def test_a_root_that_goes_and_comes_is_told(tmp_path):
    root = tmp_path / "run"
    sample_runs.light_steps(root, [1])
    records, follower = follower_of(root)
    root.rename(tmp_path / "elsewhere")
    ((name, value),) = polled(records, follower)
    assert name == "problem" and value["problem"].endswith("is gone; the page shows what was there")
    assert polled(records, follower) == []
    (tmp_path / "elsewhere").rename(root)
    assert polled(records, follower) == [("problem", {"problem": None})]


def test_pages_that_follow_slow_storages_hold_up_no_answer(tmp_path, monkeypatch):
    """Pages follow two runs whose storages stopped to answer; other requests are answered at once."""
    monkeypatch.setattr(run_records, "_REMOTE_S", 0.1)
    slow = ("slow", "slower")
    for name in (*slow, "other"):
        sample_runs.light_steps(tmp_path / name, [1])
    with running(tmp_path) as server, contextlib.ExitStack() as opened:
        roots = GatedRoots(tmp_path, *slow)
        server.api.roots = server.api._known._roots = roots
        other = server.run_id("other")
        for name in slow * 4:
            run = server.run_id(name)
            assert server.get(f"/api/runs/{run}")["problem"] is None
            page = opened.enter_context(server.connect())
            page.sendall(f"GET /api/runs/{run}/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert page.recv(100).startswith(b"HTTP/1.1 200")
        for name in slow:
            roots.storage(name).close()
        try:
            assert all(roots.storage(name).waiting.wait(30) for name in slow)
            time.sleep(2.5)
            began = time.monotonic()
            for _ in range(5):
                assert server.get(f"/api/runs/{other}")["steps"]["step"] == [1]
            assert time.monotonic() - began < 25
        finally:
            for name in slow:
                roots.storage(name).gate.set()
