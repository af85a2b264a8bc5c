"""Work on several threads: all of it is waited for, errors stop it, and the end of the interpreter allows it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.core.threads import run_on_threads

AT_EXIT = """
import atexit
from holdfast.core.threads import run_on_threads
atexit.register(lambda: run_on_threads(3, "test", "ab", lambda tasks: print(*tasks)))
"""


def test_every_task_is_done_once_and_all_threads_are_waited_for():
    done: list[int] = []
    names: set[str] = set()

    def work(tasks) -> None:
        names.add(threading.current_thread().name)
        done.extend(tasks)

    run_on_threads(3, "holdfast-test", range(1000), work)
    assert sorted(done) == list(range(1000)) and all(name.startswith("holdfast-test") for name in names)


def test_one_thread_is_the_callers_own_and_takes_tasks_in_order():
    done: list[tuple[int, int]] = []
    run_on_threads(1, "holdfast-test", range(5), lambda tasks: done.extend((n, threading.get_ident()) for n in tasks))
    assert done == [(number, threading.get_ident()) for number in range(5)]


def test_an_error_ends_the_tasks_of_the_others_and_is_raised():
    done: list[int] = []
    failed = threading.Event()

    def work(tasks) -> None:
        for task in tasks:
            if task == 1:
                failed.set()
                raise ValueError("second")
            assert failed.wait(10)
            time.sleep(0.2)
            done.append(task)

    with pytest.raises(ValueError, match="second"):
        run_on_threads(2, "holdfast-test", range(100), work)
    assert len(done) < 50


def test_while_the_interpreter_exits_the_caller_works_alone():
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "a b\n" and not run.stderr


def test_a_thread_that_cannot_be_started_hides_no_error(monkeypatch):
    """The others have begun: their errors count, and their tasks are done."""
    plain, begun, done = ThreadPoolExecutor.submit, [], []

    def submit(self, *arguments):
        if begun:
            raise RuntimeError("can't start new thread")
        begun.append(1)
        return plain(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)

    def work(tasks):
        for task in tasks:
            done.append(task)
            if task == 0:
                raise ValueError("the first task failed")

    with pytest.raises(ValueError, match="the first task failed"):
        run_on_threads(3, "test", range(5), work)
    begun.clear()
    done.clear()
    run_on_threads(3, "test", range(1, 6), work)
    assert sorted(done) == [1, 2, 3, 4, 5]


def test_long_tasks_are_told_to_stop():
    stopped = threading.Event()

    def work(tasks):
        for task in tasks:
            if task == "fails":
                raise ValueError
            assert stopped.wait(30)

    with pytest.raises(ValueError):
        run_on_threads(2, "test", ["waits", "fails"], work, stopped.set)
