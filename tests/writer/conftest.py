"""Arenas and mailboxes for the tests of the writer."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.shared_memory import create_file, unlink_file
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_card import pid_namespace
from holdfast.writer.mailbox import Mailbox
from tests.writer.two_hosts import ATTEMPT

RUN = secrets.token_hex(16)  # other test runs share the memory of this host
HOLD = "import sys\nfrom holdfast.checkpoint.shared_memory import Arena\na = Arena(sys.argv[1], 1, hold=True)\nprint('held', flush=True)\nsys.stdin.read()\n"  # noqa: E501


def wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def orphan() -> Iterator[tuple[str, int]]:
    """An arena of a dead trainer, held by a living writer; with the pid of the writer."""
    path = create_file(4096, f"{RUN}-0-{2**22}-1-{pid_namespace()}-", in_memory=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    yield path, process.pid
    process.communicate(timeout=20)
    unlink_file(path)


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    box = Mailbox(LocalStorage(tmp_path), ATTEMPT)
    box.make()
    return box
