"""Containers of one host that share /dev/shm: a root is known by its identity, a process by its namespace too.

Each container is a real pid and mount namespace, with a volume mounted at the same path.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import find_files
from holdfast.storage.local import LocalStorage
from tests.dist.harness import CONTEXT

DEADLINE_S = 60.0
NEW_MOUNTS, NEW_PIDS = 0x00020000, 0x20000000
BIND, PRIVATE = 4096, 16384 | (1 << 18)


def refused() -> str:
    """Why namespaces cannot be made here, "" if they can."""
    command = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare: {error}"
    return done.stderr.strip() or f"unshare ended with {done.returncode}" if done.returncode else ""


REFUSED = refused()
pytestmark = pytest.mark.skipif(bool(REFUSED), reason=f"no namespaces of its own are allowed here: {REFUSED}")


def call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def contain(volume: str, mount: str, deeds: list[str], line: Any) -> None:
    """Be a container: the first process of its namespaces, which stays until everything in it has ended."""
    call("unshare", NEW_MOUNTS | NEW_PIDS)
    call("mount", b"none", b"/", None, PRIVATE, None)
    call("mount", volume.encode(), mount.encode(), None, BIND, None)
    if os.fork() == 0:
        call("mount", b"proc", b"/proc", b"proc", 0, None)
        if os.fork() == 0:
            train(f"{mount}/run", deeds, line)
            os._exit(0)
        line.close()
        while True:
            try:
                os.wait()  # the trainer, and the writers that outlive it
            except ChildProcessError:
                os._exit(0)
    line.close()
    os.wait()


def train(root: str, deeds: list[str], line: Any) -> None:
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for answer in answers(root, deeds, line):
                line.send(answer)
        line.send(("warnings", [str(warning.message) for warning in caught]))
    except BaseException:  # noqa: BLE001  (the test must see it)
        line.send(("failed", traceback.format_exc()))


def answers(root: str, deeds: list[str], line: Any) -> Iterator[tuple[Any, ...]]:
    """Do one deed after another, and say what came of each."""
    state: dict[str, Any] = {"w": torch.zeros(4096)}
    with holdfast.Checkpointer(root, deadline_s=20, on_event=lambda event: None) as checkpointer:
        for deed in deeds:
            name, _, number = deed.partition(":")
            if name == "restore":
                yield "restored", checkpointer.restore(state), state["w"][0].item()
            elif name == "stay":
                yield ("stays",)
                line.recv()
            else:
                state["w"].fill_(float(number))
                if name == "fly":
                    os.kill(checkpointer._engine.background.writer.pid, signal.SIGSTOP)
                handle = checkpointer.save(int(number), state)
                yield name, int(number), None if name == "fly" else type(handle.wait(60) and handle.error).__name__


class Container:
    """A program in a container whose volume is mounted where every other container has its own."""

    def __init__(self, volume: Path, *deeds: str) -> None:
        mount = volume.parent / "mount"
        mount.mkdir(exist_ok=True)
        self.line, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=contain, args=(str(volume), str(mount), deeds, theirs))
        self.process.start()
        theirs.close()

    def hear(self) -> tuple[Any, ...]:
        assert self.line.poll(DEADLINE_S), "the container did not answer"
        answer: tuple[Any, ...] = self.line.recv()
        return answer

    def done(self) -> list[tuple[Any, ...]]:
        """All that it says to its end; its warnings are kept."""
        found = []
        while (answer := self.hear())[0] not in ("warnings", "failed"):
            found.append(answer)
        self.warnings = answer[1]
        assert answer[0] == "warnings", answer[1]
        self.process.join(DEADLINE_S)
        return found


@pytest.fixture
def volumes(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    found = tmp_path / "a", tmp_path / "b"
    for volume in found:
        volume.mkdir()
    yield found
    for volume in found:
        for path in find_files(run_id(LocalStorage(volume / "run"))):
            path.unlink(missing_ok=True)


def arenas(volume: Path) -> list[str]:
    return [path.name for path in find_files(run_id(LocalStorage(volume / "run")))]


def leave_in_memory(volume: Path, step: int) -> None:
    """A run that captured a step and could not write it: the state stays in memory."""
    thesis = volume / "run" / f"step-{step:012d}"
    thesis.mkdir(parents=True)
    (thesis / "thesis.txt").write_text("years of work")
    run = Container(volume, "save:1", f"save:{step}")
    assert run.done() == [("save", 1, "NoneType"), ("save", step, "StorageError")]
    (thesis / "thesis.txt").unlink()
    thesis.rmdir()


@pytest.mark.full
def test_the_memory_of_a_dead_run_is_its_own(volumes: tuple[Path, Path]) -> None:
    first, second = volumes
    leave_in_memory(first, 20)
    left = arenas(first)
    assert len(left) == 2  # an arena and its card
    assert Container(second, "restore", "save:5").done() == [("restored", None, 0.0), ("save", 5, "NoneType")]
    assert Container(second, "restore").done() == [("restored", 5, 5.0)]
    assert arenas(first) == left, "another root's memory is not touched"
    assert Container(first, "restore").done() == [("restored", 20, 20.0)]
    assert arenas(first) == []


@pytest.mark.full
def test_a_living_run_of_another_volume_is_not_waited_for(volumes: tuple[Path, Path]) -> None:
    first, second = volumes
    run = Container(first, "save:7", "stay")
    assert [run.hear(), run.hear()] == [("save", 7, "NoneType"), ("stays",)]
    held = arenas(first)
    other = Container(second, "restore", "save:3", "restore")
    assert other.done() == [("restored", None, 0.0), ("save", 3, "NoneType"), ("restored", 3, 3.0)]
    assert not other.warnings
    assert held and arenas(first) == held
    run.line.send("go")
    assert run.done() == []
    assert Container(first, "restore").done() == [("restored", 7, 7.0)]


@pytest.mark.full
def test_a_living_run_of_the_same_volume_is_told_apart_from_a_dead_one(volumes: tuple[Path, Path]) -> None:
    volume, _ = volumes
    run = Container(volume, "save:1", "stay", "fly:2", "stay")
    assert [run.hear(), run.hear()] == [("save", 1, "NoneType"), ("stays",)]
    beside = Container(volume, "restore")
    assert beside.done() == [("restored", 1, 1.0)]
    assert any("another run is at work" in text and "of another container" in text for text in beside.warnings)
    run.line.send("go")
    assert [run.hear(), run.hear()] == [("fly", 2, None), ("stays",)]
    trainer, writer = trainer_and_writer(run.process.pid)
    os.kill(trainer, signal.SIGKILL)
    after = Container(volume, "restore")
    time.sleep(2.0)
    assert not after.line.poll(), "the writer has not finished what was captured"
    os.kill(writer, signal.SIGCONT)
    assert after.done() == [("restored", 2, 2.0)]


def trainer_and_writer(container: int | None) -> tuple[int, int]:
    """The processes of a container as this namespace numbers them: below its first process the trainer."""

    def child(process: int | None) -> int:
        (found,) = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return int(found)

    trainer = child(child(container))
    return trainer, child(trainer)
