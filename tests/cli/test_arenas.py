"""`holdfast arenas` beside real runs: one that was killed, one whose writer never wrote, and one that lives."""

import json
import os
import pty
import re
import subprocess
import sys
import time

import pytest

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import find_files
from holdfast.cli.arenas import _command_of
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.storage.local import LocalStorage
from tests.cli.calls import call
from tests.engine.test_recovery import arenas, leave_in_memory, state


@pytest.fixture
def left(tmp_path):
    """A root whose step 9 was captured and never written: its trainer and its writer are dead."""
    root = tmp_path / "run"
    with holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
    leave_in_memory(root, 9)
    return root


def listed(root):
    return json.loads(call("arenas", root, "--json").output)


def test_a_state_that_was_not_written_is_listed_and_freed_only_if_that_is_wanted(left):
    key = run_id(LocalStorage(left))
    (entry,) = listed(left)
    assert (entry["run"], entry["step"], entry["ranks"]) == (key, 9, [0])
    assert (entry["unwritten"], entry["is_held"], entry["holders"]) == (True, False, [])
    text = call("arenas", left).output
    assert re.search(rf"^{key[:12]} +9 +0 +[\d.]+ kB  not written +no$", text, re.MULTILINE)
    assert "--free all frees it" in text
    refused = call("arenas", "--free", key[:16]).exception
    assert isinstance(refused, InvalidArgument) and "--yes" in str(refused)
    assert len(arenas(left)) == 1
    done = call("arenas", left, "--free", "all", "--yes", "--json")
    assert done.exit_code == 0
    assert [freed["step"] for freed in json.loads(done.output)["freed"]] == [9]
    assert find_files(key) == [] and call("arenas", left).output == "no arenas in the memory of this host\n"


@pytest.mark.parametrize(("answer", "is_freed"), [(b"n\n", False), (b"y\n", True)])
def test_a_person_is_asked(left, answer, is_freed):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "holdfast", "arenas", left, "--free", "all"]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    os.write(ours, answer)
    out, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert "step 9 of run" in err and "Free it?" in err
    assert ("freed 0 B of 0 states" in out) is not is_freed
    assert (len(arenas(left)) == 0) is is_freed
    call("arenas", left, "--free", "all", "--yes")


def test_what_a_living_run_holds_is_never_freed(tmp_path):
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state(1)).result(60)
        key = run_id(LocalStorage(tmp_path))
        (entry,) = listed(tmp_path)
        assert entry["is_held"] and entry["holders"] and not entry["unwritten"]
        assert "held by process" in call("arenas", tmp_path).output
        done = call("arenas", "--free", key, "--yes")
        assert done.exit_code == 1 and "kept " in done.output
        assert call("arenas", tmp_path, "--free", "all", "--yes").exit_code == 0
        assert len(arenas(tmp_path)) == 1
        checkpointer.save(2, state(2)).result(60)
    assert holdfast.open(tmp_path / "step-000000000002").verify().good


def test_a_holder_is_named_by_its_command():
    with subprocess.Popen(["sleep", "60"]) as process:
        until = time.monotonic() + 30
        while (found := _command_of(process.pid)) != "sleep 60" and time.monotonic() < until:
            time.sleep(0.01)  # it is this program until it runs its own
        assert found == "sleep 60"
        process.kill()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as writer:  # as writers are started
        assert _command_of(writer.pid) == ""
    assert _command_of(writer.pid) == ""  # it is gone


def test_a_run_that_is_not_there_is_not_found():
    assert isinstance(call("arenas", "--free", "zz").exception, NotFound)
    assert isinstance(call("arenas", "--free", "").exception, NotFound)
