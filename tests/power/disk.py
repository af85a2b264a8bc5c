"""A disk that remembers every write and every flush: one file of a FUSE mount, to be the backing of a loop device.

    python -m tests.power.disk MOUNTPOINT IMAGE LOG

The file `disk` under the mountpoint is IMAGE. Every write is appended to LOG before it is answered,
and every flush as an entry without data; so LOG tells what the disk was given, in order, and what it
promised to keep. Only what a loop device asks of a file is answered. Needs root and /dev/fuse.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

_HEADER, _ANSWER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_TRANSFER = struct.Struct("<QQIIQII")  # of reads and writes: handle, offset, size, and what is not needed
ENTRY = struct.Struct("<QI")  # of the log: offset and size; no size for a flush
_LOOKUP, _FORGET, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _STATFS = 1, 2, 3, 4, 14, 15, 16, 17
_RELEASE, _FSYNC, _FLUSH, _INIT, _INTERRUPT, _DESTROY, _FORGET_ALL = 18, 20, 25, 26, 36, 38, 42
_MAX_WRITE = 1 << 20
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_DIRECT_IO = 1  # no page cache in between: a write is seen when it is made
_FOLDER, _FILE = 1, 2


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the kernel."""

    opcode: int
    unique: int
    node: int
    body: memoryview


class Refused(Exception):
    """The answer is an error number."""


class Disk:
    """Answers requests, one at a time: the order of the log is the order of the answers."""

    def __init__(self, image: Path, log: Path) -> None:
        self._image = os.open(image, os.O_RDWR)
        self._size = os.fstat(self._image).st_size
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def serve(self, channel: int) -> None:
        """Answer until the file system is unmounted."""
        buffer = bytearray(_MAX_WRITE + (64 << 10))
        while True:
            try:
                count = os.readv(channel, [buffer])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = _HEADER.unpack_from(buffer)
            request = Request(opcode, unique, node, memoryview(buffer)[_HEADER.size : count])
            if opcode not in (_FORGET, _FORGET_ALL, _INTERRUPT):
                self._reply(channel, request)

    def _reply(self, channel: int, request: Request) -> None:
        number, data = 0, b""
        try:
            data = self._answer(request)
        except Refused as refused:
            number = refused.args[0]
        os.writev(channel, [_ANSWER.pack(_ANSWER.size + len(data), -number, request.unique), data])

    def _answer(self, request: Request) -> bytes:
        body = request.body
        if request.opcode == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, _BIG_WRITES | _MAX_PAGES, 16, 12, _MAX_WRITE, 1, 256, 0, 0)
        if request.opcode == _LOOKUP:
            if bytes(body).rstrip(b"\0") != b"disk":
                raise Refused(errno.ENOENT)
            return struct.pack("<QQQQII", _FILE, 0, 3600, 3600, 0, 0) + self._attributes(_FILE)
        if request.opcode in (_GETATTR, _SETATTR):
            return struct.pack("<QII", 3600, 0, 0) + self._attributes(request.node)
        if request.opcode == _OPEN:
            return struct.pack("<QIi", 0, _DIRECT_IO, 0)
        if request.opcode == _READ:
            _, offset, size, *_ = _TRANSFER.unpack_from(body)
            return os.pread(self._image, size, offset)
        if request.opcode == _WRITE:
            return self._write(body)
        if request.opcode == _FSYNC:
            os.write(self._log, ENTRY.pack(0, 0))
            return b""
        if request.opcode == _STATFS:
            return struct.pack("<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 16, 16, 4096, 255, 4096, 0)
        if request.opcode in (_RELEASE, _FLUSH, _DESTROY):
            return b""
        raise Refused(errno.ENOSYS)

    def _write(self, body: memoryview) -> bytes:
        _, offset, size, *_ = _TRANSFER.unpack_from(body)
        data = body[_TRANSFER.size : _TRANSFER.size + size]
        os.writev(self._log, [ENTRY.pack(offset, size), data])
        os.pwrite(self._image, data, offset)
        return struct.pack("<II", size, 0)

    def _attributes(self, node: int) -> bytes:
        mode, size = (0o40700, 0) if node == _FOLDER else (0o100600, self._size)
        return _ATTRIBUTES.pack(node, size, size // 512, *[0] * 6, mode, 1, 0, 0, 0, 4096, 0)


def mount(mountpoint: Path) -> int:
    """Mount; returns the channel that requests come through."""
    channel = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={channel},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"holdfast-power", os.fsencode(mountpoint), b"fuse", ctypes.c_ulong(0), options):
        raise OSError(ctypes.get_errno(), f"mounting {mountpoint}: {os.strerror(ctypes.get_errno())}")
    return channel


if __name__ == "__main__":
    where, image_path, log_path = map(Path, sys.argv[1:])
    served = mount(where)
    print("mounted", flush=True)
    Disk(image_path, log_path).serve(served)
