"""A storage that fails on demand: the k-th call raises, kills, hangs, stops half-way or corrupts data.

    storage = faulty(LocalStorage(root), Fault("enospc", at=3, call="write", lasting=True))
    holdfast.Checkpointer(storage)

To inject faults into the writer processes too, start them inside `writer_faults`:

    with writer_faults("kill@3:write"), holdfast.Checkpointer(root) as checkpointer:
        checkpointer.save(1, state)

Every injected fault is reported on standard error, with the text that repeats it. No environment
variable injects a fault, since it would reach production jobs as well.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.core.errors import Damaged, InvalidArgument, StorageError
from holdfast.storage.base import Storage
from holdfast.testing.watched import Buffers, Gate, WatchedStorage, watched
from holdfast.writer.client import WriterProgram, writers_running

__all__ = ["Fault", "FaultGate", "faulty", "writer_faults"]

_ERRORS = {"enospc": errno.ENOSPC, "edquot": errno.EDQUOT, "eio": errno.EIO}
_KINDS = (*_ERRORS, "kill", "short", "hang", "corrupt")
_TEXT = re.compile(
    r"(?P<do>\w+)@(?P<at>\d+)(?P<lasting>\+?)(:(?P<call>[\w|]*))?(#(?P<seed>\d+))?(~(?P<hang_s>[\d.]+))?"
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure, and the call at which it happens.

    do: enospc, edquot or eio (the call raises StorageError and does nothing), kill (SIGKILL to
    this process before the call), short (half is written, then it raises; half is read), hang
    (for `hang_s` seconds, or until the gate is released; then it raises), corrupt (flips one bit
    of the data read or written).
    at: the number of the call, from 1, among calls of the kinds `call` (`write|sync`; all if
    empty). lasting: fail from that call on. seed: selects the bit.
    """

    do: str
    at: int = 1
    call: str = ""
    lasting: bool = False
    seed: int = 0
    hang_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.do not in _KINDS or self.at < 1:
            raise InvalidArgument(
                f"{self.do!r} at call {self.at}: use one of {', '.join(_KINDS)}, and a call from 1 on"
            )

    def __str__(self) -> str:
        return f"{self.do}@{self.at}{'+' * self.lasting}:{self.call}#{self.seed}~{self.hang_s:g}"

    @staticmethod
    def parse(text: str) -> Fault:
        """Parse the text form of a fault; raises InvalidArgument for any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise InvalidArgument(f"{text!r} is not a fault: write it as kill@3, eio@1+:write|sync or corrupt@2:read#7")
        return Fault(
            match["do"],
            int(match["at"]),
            match["call"] or "",
            bool(match["lasting"]),
            int(match["seed"] or 0),
            float(match["hang_s"] or 3600),
        )


@dataclass
class FaultGate(Gate):
    """Counts calls and injects one fault; `done` lists injected faults, `count` the calls that could fail."""

    fault: Fault | None
    count: int = 0
    done: list[str] = field(default_factory=list)
    quiet: bool = False

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._released = threading.Event()

    def release(self) -> None:
        """Release calls that hang: they raise."""
        self._released.set()

    def call(self, kind: str, where: str, work: Callable[[], T]) -> T:
        fault = self._due(kind, where, carries=False)
        if fault is not None:
            self._fail(fault, kind, where)
        return work()

    def write(self, kind: str, where: str, buffers: Buffers, work: Callable[[Buffers], None]) -> None:
        fault = self._due(kind, where)
        if fault is None:
            work(buffers)
        elif fault.do == "corrupt":
            work([memoryview(_flipped(b"".join(_plain(buffers)), fault.seed))])
        elif fault.do == "short":
            data = b"".join(_plain(buffers))
            work([memoryview(data)[: len(data) // 2]])
            raise StorageError(f"{kind} {where}: {os.strerror(errno.EIO)} after {len(data) // 2} of {len(data)} bytes")
        else:
            self._fail(fault, kind, where)

    def read_into(self, kind: str, where: str, buffers: Buffers, work: Callable[[Buffers], None]) -> None:
        fault = self._due(kind, where)
        if fault is None:
            return work(buffers)
        if fault.do == "short":
            for buffer in _plain(buffers):
                work([buffer[: buffer.nbytes // 2]])
                raise Damaged(f"{kind} {where}: the file ends too early")
            return None
        if fault.do != "corrupt":
            self._fail(fault, kind, where)
        work(buffers)
        filled = _plain(buffers)
        at = random.Random(fault.seed).randrange(max(1, 8 * sum(buffer.nbytes for buffer in filled)))  # noqa: S311
        for buffer in filled:
            if at < 8 * buffer.nbytes:
                buffer[at // 8] ^= 1 << at % 8
                break
            at -= 8 * buffer.nbytes
        return None

    def read(self, kind: str, where: str, work: Callable[[], bytes]) -> bytes:
        fault = self._due(kind, where)
        if fault is not None and fault.do not in ("short", "corrupt"):
            self._fail(fault, kind, where)
        data = work()
        if fault is None:
            return data
        return data[: len(data) // 2] if fault.do == "short" else bytes(_flipped(data, fault.seed))

    def _due(self, kind: str, where: str, *, carries: bool = True) -> Fault | None:
        """Return the fault if this call must fail; only calls that carry bytes can be short or corrupt."""
        fault = self.fault
        with self._lock:
            if fault is None:
                self.count += 1
                return None
            if (fault.call and kind not in fault.call.split("|")) or (fault.do in ("short", "corrupt") and not carries):
                return None
            self.count += 1
            if self.count != fault.at and not (fault.lasting and self.count > fault.at):
                return None
            self.done.append(f"{fault} at {kind} {where}")
        if not self.quiet:
            print(f"holdfast.testing: {self.done[-1]}", file=sys.stderr, flush=True)
        return fault

    def _fail(self, fault: Fault, kind: str, where: str) -> None:
        if fault.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.do == "hang":
            self._released.wait(fault.hang_s)
        number = _ERRORS.get(fault.do, errno.ETIMEDOUT)
        error = StorageError(f"{kind} {where}: {os.strerror(number)}")
        error.errno = number
        raise error


def _plain(buffers: Buffers) -> list[memoryview]:
    return [buffer.cast("B") for buffer in buffers if buffer.nbytes]


def _flipped(data: bytes, seed: int) -> bytearray:
    out = bytearray(data)
    if out:
        bit = random.Random(seed).randrange(8 * len(out))  # noqa: S311  (repeatable, not secret)
        out[bit // 8] ^= 1 << bit % 8
    return out


def faulty(storage: Storage, fault: Fault | str | None, *, quiet: bool = False) -> WatchedStorage:
    """Wrap a storage with a fault; with None it only counts. Its `gate` lists the injected faults."""
    return watched(storage, FaultGate(Fault.parse(fault) if isinstance(fault, str) else fault, quiet=quiet))


@contextlib.contextmanager
def writer_faults(fault: Fault | str) -> Iterator[None]:
    """Inject a fault into the storage of writer processes started inside the context, each with its own count."""
    text = str(Fault.parse(fault) if isinstance(fault, str) else fault)
    with writers_running(WriterProgram("holdfast.testing.writer", (text,))):
        yield
