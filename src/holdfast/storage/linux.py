"""System calls that Python's os module lacks: locks, claims, exchange, reserve, statx, cachestat, page faults."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import random
import secrets
import struct
import time
from collections.abc import Callable
from pathlib import Path

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_MADV_DONTNEED, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 4, 22, 23
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Magic numbers of statfs: ext2 to ext4, xfs, btrfs, tmpfs, overlayfs, zfs, f2fs, bcachefs.
_OVERLAYFS = 0x794C7630
_LOCAL_FILE_SYSTEMS = {0xEF53, 0x58465342, 0x9123683E, 0x01021994, _OVERLAYFS, 0x2FC12FC1, 0xF2F52010, 0xCA451A4E}
_CACHESTAT = 451  # the system call's number on x86-64 and ARM64
_LOCK_TRIES = 5
_STATX_BTIME = 0x800
_BIRTH = "I76xqI"  # struct statx: the mask of fields that are set; at byte 80 the birth time, seconds and nanoseconds
_FLOCK = "hhqqi4x"  # struct flock: type, whence, start, length, process
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc if hasattr(libc, "fallocate") and hasattr(libc, "renameat2") else None


def _error_of(call: Callable[..., int], *arguments: object) -> int:
    """Return the errno of a call, 0 on success. A call interrupted by a signal is repeated, as Python does."""
    while call(*arguments):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0


def reserve(descriptor: int, size: int) -> None:
    """Allocate a file at its full size, so that a full disk is detected before writing.

    Where the file system cannot reserve space, only the size is set.
    """
    libc = _libc()
    if size and libc is not None:
        length = ctypes.c_int64(size)
        number = _error_of(libc.fallocate, ctypes.c_int(descriptor), ctypes.c_int(0), ctypes.c_int64(0), length)
        if not number:
            return
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))
    os.ftruncate(descriptor, size)


def exchange(first: Path, second: Path) -> None:
    """Swap two folders atomically.

    Without support by the file system, the second folder is first renamed to a name with
    `.replaced-` in it. A crash between the two renames leaves it there, and no committed step.
    """
    libc = _libc()
    if libc is not None:
        number = _error_of(
            libc.renameat2, ctypes.c_int(_AT_FDCWD), os.fsencode(first), ctypes.c_int(_AT_FDCWD), os.fsencode(second),
            ctypes.c_uint(_RENAME_EXCHANGE),
        )  # fmt: skip
        if not number:
            return
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), str(second))
    aside = second.with_name(f"{second.name}.replaced-{secrets.token_hex(4)}")
    os.rename(second, aside)
    try:
        os.rename(first, second)
    except OSError:
        os.rename(aside, second)
        raise
    os.rename(aside, first)


def is_local_file_system(path: Path) -> bool:
    """Return True if a path is on a local disk or in memory of this host, according to statfs."""
    libc = _libc()
    if libc is None or not hasattr(libc, "statfs"):
        return False
    # The first field of struct statfs is the type, one word wide. The other fields are not needed.
    buffer = ctypes.create_string_buffer(512)
    if libc.statfs(os.fsencode(path), buffer):
        return False
    word = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return word in _LOCAL_FILE_SYSTEMS


def birth_time_ns(descriptor: int) -> int | None:
    """Return when an open file was created; None where the file system does not record it."""
    libc = _libc()
    if libc is None or not hasattr(libc, "statx"):
        return None
    buffer = ctypes.create_string_buffer(256)
    if libc.statx(ctypes.c_int(descriptor), b"", ctypes.c_int(_AT_EMPTY_PATH), ctypes.c_uint(_STATX_BTIME), buffer):
        return None
    fields, seconds, nanoseconds = struct.unpack_from(_BIRTH, buffer)
    return seconds * 1_000_000_000 + nanoseconds if fields & _STATX_BTIME else None


def is_overlay(descriptor: int) -> bool:
    """Return True if an open file is on overlayfs, whose files have no pages of their own."""
    libc = _libc()
    if libc is None or not hasattr(libc, "fstatfs"):
        return False
    buffer = ctypes.create_string_buffer(512)
    if libc.fstatfs(ctypes.c_int(descriptor), buffer):
        return False
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF == _OVERLAYFS


def cached_bytes(descriptor: int, offset: int, size: int) -> int | None:
    """Return how many bytes of a range are in the page cache, in whole pages; None if the kernel does not say."""
    libc = _libc()
    if libc is None or not hasattr(libc, "syscall"):
        return None
    asked, found = struct.pack("QQ", offset, size), ctypes.create_string_buffer(40)  # the first field: pages
    arguments = (ctypes.c_long(_CACHESTAT), ctypes.c_int(descriptor), asked, found, ctypes.c_uint(0))
    if libc.syscall(*arguments):
        return None
    return int(struct.unpack_from("Q", found)[0]) * _PAGE_BYTES


def start_write_back(descriptor: int, offset: int, size: int) -> None:
    """Ask the kernel to start writing a range to disk. Only a hint: `fsync` reports errors."""
    libc = _libc()
    if libc is not None and hasattr(libc, "sync_file_range"):
        libc.sync_file_range(
            ctypes.c_int(descriptor),
            ctypes.c_int64(offset),
            ctypes.c_int64(size),
            ctypes.c_uint(_SYNC_FILE_RANGE_WRITE),
        )


def lock(descriptor: int, *, exclusive: bool, once: bool = False) -> bool:
    """Lock an open file or folder, exclusively or shared. Returns False if another process holds the lock.

    Tried a few times unless `once`, because a process that only checks for holders takes the exclusive
    lock for a moment. The lock ends when the last copy of the descriptor is closed. Where the file system
    has no locks, every lock is granted.
    """
    for number in range(1 if once else _LOCK_TRIES):
        if number:
            time.sleep(random.uniform(0.001, 0.01))  # noqa: S311  (jitter, so that two processes do not retry in lockstep)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError as error:
            if error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
                raise
            return True
        else:
            return True
    return False


def unlock(descriptor: int) -> None:
    """Release the locks of `lock` and `claim`, even if a map of the file keeps a copy of the descriptor."""
    with contextlib.suppress(OSError):  # locks are not supported, so none is held
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_UNLCK, os.SEEK_SET, 0, 1, 0))


def claim(descriptor: int) -> bool:
    """Mark an open file as used by this process, independently of `lock`. Returns False if it is already marked.

    The mark is a lock on the first byte. It is visible from every pid namespace, and ends with
    the last copy of the descriptor.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _first_byte())
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        if error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
            raise
    return True


def is_claimed(descriptor: int) -> bool:
    """Return True if a live process has marked the file with `claim`."""
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _first_byte())
    except OSError as error:
        if error.errno not in (*_UNSUPPORTED, errno.ENOLCK):
            raise
        return False
    kind: int = struct.unpack(_FLOCK, answer)[0]
    return kind != fcntl.F_UNLCK


def _first_byte() -> bytes:
    return struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)


def populate(address: int, size: int, *, write: bool) -> None:
    """Fault in the pages of a range of a map in one call, so that later accesses do not wait for them one by one."""
    libc = _libc()
    if libc is not None:
        start = address - address % _PAGE_BYTES
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + size - start), ctypes.c_int(advice))


def unmap_pages(address: int, size: int) -> None:
    """Take the whole pages in a range of a shared map out of this process; the file keeps their bytes.

    Not for private memory, which would lose them.
    """
    libc = _libc()
    start, end = -(-address // _PAGE_BYTES) * _PAGE_BYTES, (address + size) // _PAGE_BYTES * _PAGE_BYTES
    if libc is not None and start < end:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_MADV_DONTNEED))
