"""A second user for tests: work done in a child process that has given its privileges up."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import holdfast

NOBODY = 65534


def require_root() -> None:
    """Skip the test where no other user can be played."""
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")


def as_user(uid: int, work: Callable[[], object]) -> str:
    """Run `work` as another user, without any of root's groups; returns the text of its result or its error."""
    require_root()
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receiver)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            try:
                text = f"{work()}"
            except Exception as error:  # noqa: BLE001  (the parent judges it)
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"
            os.write(sender, text.encode()[:60_000])
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(child, 0)
    return text


def run_as_user(uid: int, script: str, *arguments: object, timeout_s: float = 120) -> str:
    """Run a Python script as another user that may read everything and write only what is its own; its output.

    The one capability lets it read an interpreter that is installed in root's home.
    """
    require_root()
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("there is no setpriv to start a process of another user with")
    who = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    source = str(Path(holdfast.__file__).parents[1])
    done = subprocess.run(
        [setpriv, *who, *caps, sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": source, "HOME": tempfile.gettempdir(), "PYTHONDONTWRITEBYTECODE": "1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if "setpriv:" in done.stderr and "failed" in done.stderr:
        pytest.skip(f"a process of another user cannot be started here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in which every user may make files, as /tmp is; pytest's own are closed to others."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-shared-"))
    folder.chmod(0o1777)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
