"""Work on several threads: all of it is waited for, errors stop it, and the end of the interpreter allows it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from holdfast.core.threads import run_on_threads

AT_EXIT = """
import atexit
from holdfast.core.threads import run_on_threads
atexit.register(lambda: run_on_threads(3, "test", lambda: print("worked"), lambda: None))
"""


def test_each_thread_works_once_and_all_are_waited_for():
    users = []
    run_on_threads(3, "holdfast-test", lambda: users.append(threading.current_thread().name), lambda: None)
    assert len(users) == 3 and all(name.startswith("holdfast-test") for name in users)


def test_one_thread_is_the_callers_own():
    users: list[int] = []
    run_on_threads(1, "holdfast-test", lambda: users.append(threading.get_ident()), lambda: None)
    assert users == [threading.get_ident()]


def test_an_error_stops_the_others_and_is_raised():
    stopped = threading.Event()
    turns = iter(range(2))

    def work() -> None:
        if next(turns):
            raise ValueError("second")
        assert stopped.wait(10)

    with pytest.raises(ValueError, match="second"):
        run_on_threads(2, "holdfast-test", work, stopped.set)
    assert stopped.is_set()


def test_while_the_interpreter_exits_the_caller_works_alone():
    run = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "worked\n" and not run.stderr
