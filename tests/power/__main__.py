"""Power cuts on real file systems: `python -m tests.power [--kinds ext4,xfs] [--cuts N] [--seed N]`.

A run saves on a loop device whose disk logs every write and flush. In the middle of each save the
power is cut: what was flushed is there, of the rest any part. Each cut is mounted, which replays
the journal, and a run is started on it: it must restore the acknowledged step or a newer one, save,
and `holdfast gc` must work. Exit 1 if a cut was not survived, 2 if this machine cannot do it.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import random
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.cli import gc
from holdfast.cli.main import cli
from holdfast.core.ranks import HOST_VARIABLE
from holdfast.storage.local import LocalStorage
from holdfast.writer.startup_cleanup import clean_arenas
from tests.power.cuts import Cutter, Entry, read_log
from tests.power.run import is_state_of, state_of

_SIZE = 320 << 20  # xfs takes no less than 300 MiB
_MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}
_OPTIONS = {"ext4": "loop", "xfs": "loop,nouuid"}
_SILENCE_S = 0.3  # the run before is dead, whatever its notes say


@dataclass(frozen=True, slots=True)
class Save:
    """One save: its step, and how long the log was when it began and when it was acknowledged."""

    step: int
    began: int
    acknowledged: int


def missing(kinds: Sequence[str]) -> str:
    """Why power cannot be cut on this machine, "" if it can."""
    if os.geteuid():
        return "it needs root: to mount"
    for path in ("/dev/fuse", "/dev/loop-control"):
        if not os.path.exists(path):
            return f"there is no {path}"
    absent = [_MAKE[kind][0] for kind in kinds if shutil.which(_MAKE[kind][0]) is None]
    return f"there is no {', '.join(absent)}" if absent else ""


@contextmanager
def mounted(image: Path, kind: str, mountpoint: Path) -> Iterator[None]:
    mountpoint.mkdir(exist_ok=True)
    _call("mount", "-t", kind, "-o", _OPTIONS[kind], str(image), str(mountpoint))
    try:
        yield
    finally:
        _unmount(mountpoint)


def _unmount(mountpoint: Path) -> None:
    for _ in range(50):
        if subprocess.run(["umount", str(mountpoint)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)  # a process that just ended may still have a file open
    _call("umount", "-l", str(mountpoint))


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")


@contextmanager
def _served(folder: Path, image: Path, log: Path) -> Iterator[Path]:
    """A disk that logs what it is given; yields the file to mount."""
    mountpoint = folder / "disk"
    mountpoint.mkdir()
    command = [sys.executable, "-m", "tests.power.disk", str(mountpoint), str(image), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        if server.stdout.readline() != "mounted\n":
            raise OSError("the disk was not mounted")
        try:
            yield mountpoint / "disk"
        finally:
            _unmount(mountpoint)
            server.wait(20)


def record(kind: str, saves: int, folder: Path) -> tuple[Path, Path, list[Save]]:
    """Run the saves on a disk that logs; returns the image as it was at first, the log, and the saves."""
    first, image, log = folder / "first", folder / "image", folder / "log"
    with first.open("wb") as file:
        file.truncate(_SIZE)
    _call(*_MAKE[kind], str(first))
    shutil.copyfile(first, image)
    log.touch()
    with _served(folder, image, log) as disk, mounted(disk, kind, folder / "mount"):
        command = [sys.executable, "-m", "tests.power.run", str(folder / "mount" / "run"), str(log), "1", str(saves)]
        done = subprocess.run(
            command, env={**os.environ, HOST_VARIABLE: "before"}, stdout=subprocess.PIPE, text=True, check=True
        )
    found = [Save(**json.loads(line)) for line in done.stdout.splitlines()]
    return first, log, found


def choose(saves: Sequence[Save], entries: Sequence[Entry], chance: random.Random) -> list[tuple[int, int]]:
    """Of each save a cut in the middle: after so many entries, with the step that was acknowledged by then."""
    ends = [entry.end for entry in entries]
    cuts = []
    for save in saves:
        low, high = bisect.bisect_right(ends, save.began), bisect.bisect_right(ends, save.acknowledged)
        after = chance.randint(low + 1, max(low + 1, high))
        sure = [other.step for other in saves if bisect.bisect_right(ends, other.acknowledged) <= after]
        cuts.append((after, max(sure, default=0)))
    return sorted(cuts)


def go_on(root: Path, acknowledged: int) -> int:
    """Start a run on what is left; returns the step it restored, raises what is wrong."""
    state = state_of(0)
    try:
        with holdfast.Checkpointer(
            root, deadline_s=60, silence_s=_SILENCE_S, block_bytes=1 << 16, on_event=lambda event: None
        ) as checkpointer:
            found = checkpointer.restore(state) or 0
            if found < acknowledged:
                raise AssertionError(f"restored step {found}, acknowledged was {acknowledged}")
            if not is_state_of(state, found):
                raise AssertionError(f"restored step {found}, and the state is another")
            checkpointer.save(found + 1, state_of(found + 1)).result(60)
        done = CliRunner().invoke(cli, ["gc", str(root)])
        if done.exit_code:
            raise AssertionError(f"gc: {done.output} {done.exception!r}")
        left = [path.name for path in root.iterdir() if path.name.startswith((".attempt-", ".mail-", ".removed-"))]
        if left:
            raise AssertionError(f"left for ever: {left}")
        return found
    finally:
        clean_arenas(run_id(LocalStorage(root)))


def power_cuts(kind: str, count: int, seed: int) -> tuple[int, int]:
    """Cut the power in the middle of so many saves; how many were survived, and how many ended in a newer step."""
    chance = random.Random(f"{seed}:{kind}")
    survived = newer = 0
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix=f"holdfast-power-{kind}-", dir=where) as name, ExitStack() as stack:
        folder = Path(name)
        first, log, saves = record(kind, count, folder)
        entries = read_log(log)
        flushes = sum(not entry.size for entry in entries)
        print(f"{kind}: {len(saves)} saves, {len(entries) - flushes} writes, {flushes} flushes", flush=True)
        cutter = Cutter(first, log, entries, folder)
        stack.callback(lambda: os.environ.pop(HOST_VARIABLE, None))
        os.environ[HOST_VARIABLE] = "after"  # a boot of its own: nothing of the run before is alive
        for number, (after, acknowledged) in enumerate(choose(saves, entries, chance)):
            what = cutter.cut(after, chance, folder / "cut")
            try:
                with mounted(folder / "cut", kind, folder / "after"):
                    newer += go_on(folder / "after" / "run", acknowledged) > acknowledged
                survived += 1
            except (AssertionError, holdfast.HoldfastError, OSError) as error:
                traceback.print_exception(error)
                print(f"{kind}: cut {number} after entry {after}, {what}, step {acknowledged} acknowledged: {error}")
    return survived, newer


def main() -> int:
    """Run; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.power", description=__doc__)
    parser.add_argument("--kinds", default="ext4,xfs")
    parser.add_argument("--cuts", type=int, default=200, help="of each file system")
    parser.add_argument("--seed", type=int, default=None, help="cuts at the same places of what is recorded")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    why = missing(kinds)
    if why:
        print(f"left out: {why}", file=sys.stderr)
        return 2
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    warnings.simplefilter("ignore")
    gc._SILENCE_S = _SILENCE_S
    bad = 0
    for kind in kinds:
        started = time.monotonic()
        survived, newer = power_cuts(kind, options.cuts, seed)
        bad += options.cuts - survived
        print(
            f"{kind}: {survived} of {options.cuts} cuts restored the acknowledged step or a newer one ({newer} newer), "
            f"saved and collected; {time.monotonic() - started:.0f} s, seed {seed}",
            flush=True,
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
