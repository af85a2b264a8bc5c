"""Interception of the system calls that change a disk, to see what a local storage does.

Only calls of this process through Python's os module (including `os.fdopen`) and
`holdfast.storage.linux` are intercepted, not Python's own `open`.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.storage import linux

_WRITING = os.O_WRONLY | os.O_RDWR
_BY_NUMBER = ("fsync", "fdatasync", "ftruncate", "write", "pwrite", "pwritev")
_BY_PATH = ("mkdir", "unlink", "remove", "rmdir")
_BY_TWO_PATHS = ("rename", "replace", "link")


@dataclass(frozen=True, slots=True)
class SystemCall:
    """One call: its name, its path or paths (also of descriptors), and the data or size it carries."""

    name: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""
    size: int = 0


Watcher = Callable[[SystemCall, Callable[[], Any]], Any]


@contextmanager
def watched_system(watcher: Watcher) -> Iterator[None]:
    """Pass every call that changes files to `watcher(call, work)`, which may run `work` or not."""
    patches = _Patches(watcher)
    try:
        patches.install()
        yield
    finally:
        patches.remove()


class _Patches:
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._kept: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        for name in _BY_NUMBER:
            self._patch(os, name, self._by_number)
        for name in _BY_PATH:
            self._patch(os, name, self._by_path)
        for name in _BY_TWO_PATHS:
            self._patch(os, name, self._by_two_paths)
        self._patch(os, "open", self._open)
        self._patch(os, "fdopen", self._fdopen)
        self._patch(linux, "exchange", self._by_two_paths)
        self._patch(linux, "reserve", self._by_number)

    def _patch(self, module: Any, name: str, seen: Callable[..., Any]) -> None:
        plain = getattr(module, name)
        self._kept.append((module, name, plain))
        setattr(module, name, lambda *args, **options: seen(name, plain, args, options))

    def remove(self) -> None:
        for module, name, plain in reversed(self._kept):
            setattr(module, name, plain)

    def _by_number(self, name: str, plain: Any, args: Any, options: Any) -> Any:
        path = _path_of(args[0])
        call = SystemCall(name, path)
        if name in ("ftruncate", "reserve"):
            call = SystemCall(name, path, size=args[1])
        elif name == "pwritev":
            call = SystemCall(name, path, offset=args[2], data=b"".join(args[1]))
        elif name == "pwrite":
            call = SystemCall(name, path, offset=args[2], data=bytes(args[1]))
        elif name == "write":
            at = os.lseek(args[0], 0, os.SEEK_CUR) if Path(path).is_file() else 0
            call = SystemCall(name, path, offset=at, data=bytes(args[1]))
        return self._watcher(call, lambda: plain(*args, **options))

    def _by_path(self, name: str, plain: Any, args: Any, options: Any) -> Any:
        path = _absolute(args[0], options.get("dir_fd"))
        return self._watcher(SystemCall("unlink" if name == "remove" else name, path), lambda: plain(*args, **options))

    def _by_two_paths(self, name: str, plain: Any, args: Any, options: Any) -> Any:
        first = _absolute(args[0], options.get("src_dir_fd"))
        second = _absolute(args[1], options.get("dst_dir_fd"))
        call = SystemCall("rename" if name == "replace" else name, first, second)
        return self._watcher(call, lambda: plain(*args, **options))

    def _open(self, name: str, plain: Any, args: Any, options: Any) -> Any:
        flags = args[1] if len(args) > 1 else options["flags"]
        if not flags & (_WRITING | os.O_CREAT | os.O_TRUNC):
            return plain(*args, **options)
        path = _absolute(args[0], options.get("dir_fd"))
        made = flags & os.O_CREAT and not os.path.lexists(path)
        call = SystemCall("create" if made else "truncate" if flags & os.O_TRUNC else "open", path)
        return self._watcher(call, lambda: plain(*args, **options))

    def _fdopen(self, name: str, plain: Any, args: Any, options: Any) -> Any:
        mode = args[1] if len(args) > 1 else options.get("mode", "r")
        if mode not in ("wb", "ab"):
            return plain(*args, **options)  # reading, or text mode, which no storage writes
        return io.BufferedWriter(_Descriptor(args[0]))


class _Descriptor(io.RawIOBase):
    """An open file whose writes are calls of `os.write`, so that they are intercepted."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return os.write(self._descriptor, bytes(data))

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def _absolute(path: Any, folder: int | None) -> str:
    base = _path_of(folder) if folder is not None else str(Path.cwd())
    return os.path.normpath(os.path.join(base, os.fspath(path)))


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())
