"""Jobs: few at a time, cancelled at the next step, ended at their limit, and no error ends the server."""

import threading
import time

import pytest

from holdfast.core.errors import Damaged, NotFound
from holdfast.web.http_request import BadRequest
from holdfast.web.page_jobs import JobStop, JobTable


def wait(job):
    deadline = time.monotonic() + 30
    while job.state == "running" and time.monotonic() < deadline:
        time.sleep(0.005)
    return job


def forever(job):
    while True:
        job.advance(1)
        time.sleep(0.001)


def test_a_job_has_its_result():
    table = JobTable()
    job = wait(table.start("add", 10, lambda job: 1 + 1))
    assert table.get(job.id).fields() == {
        "state": "done", "done": 0, "total": 0, "text": "add", "result": 2, "error": None
    }  # fmt: skip


def test_a_cancelled_job_ends():
    table = JobTable()
    job = table.start("wait", 1000, forever)
    job.cancel()
    assert (wait(job).state, job.result) == ("cancelled", None)


def test_a_job_ends_at_its_limit_with_what_it_has():
    def work(job):
        try:
            forever(job)
        except JobStop:
            return {"partial": True}

    table = JobTable()
    assert wait(table.start("wait", 0.05, forever)).error["kind"] == "TimedOut"
    job = wait(table.start("wait", 0.05, work))
    assert (job.state, job.result) == ("done", {"partial": True})


def test_at_most_four_run_and_a_fifth_is_told_so():
    table = JobTable()
    running = [table.start("wait", 1000, forever) for _ in range(4)]
    with pytest.raises(BadRequest) as found:
        table.start("wait", 1000, forever)
    assert found.value.status == 429
    table.cancel_all()
    assert [wait(job).state for job in running] == ["cancelled"] * 4
    assert wait(table.start("again", 10, lambda job: 5)).result == 5


def test_errors_become_states_without_paths_of_the_unexpected(capsys):
    def fail(job):
        raise Damaged("step 3: broken")

    def crash(job):
        raise RuntimeError("/home/me/secret")

    table = JobTable()
    assert wait(table.start("a", 10, fail)).error == {"kind": "Damaged", "message": "step 3: broken"}
    assert "secret" not in str(wait(table.start("a", 10, crash)).fields())
    assert "/home/me/secret" in capsys.readouterr().err


def test_old_jobs_are_forgotten():
    table, threads = JobTable(), threading.active_count()
    first = wait(table.start("0", 10, lambda job: 0))
    for number in range(100):
        wait(table.start(str(number), 10, lambda job: 0))
    with pytest.raises(NotFound):
        table.get(first.id)
    assert len(table._jobs) <= 14
    assert threading.active_count() < threads + 5
