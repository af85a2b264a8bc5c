import ctypes
import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.storage import linux


@pytest.fixture(params=["with system calls", "without"])
def system(request, monkeypatch):
    """Every function must give the same result where the C library lacks the call."""
    if request.param == "without":
        monkeypatch.setattr(linux, "_libc", lambda: None)
    return request.param


def folder(path, content):
    path.mkdir()
    (path / "f").write_text(content)
    return path


def test_calls_that_a_signal_interrupts_are_made_again(monkeypatch, tmp_path):
    class Interrupted:
        """The C library, every call of which is interrupted once."""

        def __init__(self, libc):
            self.libc, self.seen = libc, set()

        def __getattr__(self, name):
            if name in self.seen:
                return getattr(self.libc, name)
            return lambda *arguments: self.interrupt(name, arguments)

        def interrupt(self, name, arguments):
            if name in self.seen:
                return getattr(self.libc, name)(*arguments)
            self.seen.add(name)
            ctypes.set_errno(errno.EINTR)
            return -1

    libc = Interrupted(linux._libc())
    if libc.libc is None:
        pytest.skip("there are no such calls here")
    monkeypatch.setattr(linux, "_libc", lambda: libc)
    with (tmp_path / "file").open("wb") as file:
        linux.reserve(file.fileno(), 5000)
        assert os.fstat(file.fileno()).st_size == 5000
    linux.exchange(folder(tmp_path / "a", "new"), folder(tmp_path / "b", "old"))
    assert (tmp_path / "b" / "f").read_text() == "new" and libc.seen == {"fallocate", "renameat2"}


def test_exchange_swaps_two_folders(system, tmp_path):
    new, old = folder(tmp_path / ".attempt", "new"), folder(tmp_path / "step-1", "old")
    linux.exchange(new, old)
    assert (old / "f").read_text() == "new"
    assert (new / "f").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == [".attempt", "step-1"]


def test_exchange_without_the_other_folder_fails_and_changes_nothing(system, tmp_path):
    new = folder(tmp_path / ".attempt", "new")
    with pytest.raises(FileNotFoundError):
        linux.exchange(new, tmp_path / "step-1")
    assert os.listdir(tmp_path) == [".attempt"]


def test_the_stand_in_for_exchange_never_has_two_names_for_one_step(monkeypatch, tmp_path):
    seen = []
    rename = os.rename

    def recorded(source, target):
        rename(source, target)
        seen.append(sorted(os.listdir(tmp_path)))

    monkeypatch.setattr(linux, "_libc", lambda: None)
    monkeypatch.setattr(os, "rename", recorded)
    linux.exchange(folder(tmp_path / ".attempt", "new"), folder(tmp_path / "step-1", "old"))
    names = [[name.partition("-1.replaced-")[0] for name in found] for found in seen]
    assert names == [[".attempt", "step"], ["step-1", "step"], [".attempt", "step-1"]]


def test_the_stand_in_for_exchange_puts_the_old_folder_back_when_it_fails(monkeypatch, tmp_path):
    old = folder(tmp_path / "step-1", "old")
    monkeypatch.setattr(linux, "_libc", lambda: None)
    with pytest.raises(FileNotFoundError):
        linux.exchange(tmp_path / "absent", old)
    assert os.listdir(tmp_path) == ["step-1"]


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_reserve_gives_a_file_its_size_in_zeros(system, tmp_path, size):
    with open(tmp_path / "f", "wb") as file:
        linux.reserve(file.fileno(), size)
    assert (tmp_path / "f").read_bytes() == bytes(size)


def test_reserve_takes_the_space_and_not_only_the_size():
    path = Path("/dev/shm") / f"holdfast-test-{os.getpid()}"
    try:
        with open(path, "xb") as file:
            linux.reserve(file.fileno(), 2**20)
            assert os.fstat(file.fileno()).st_blocks * 512 >= 2**20
    finally:
        path.unlink()


LIMITED = """
import resource, sys
from holdfast.storage import linux
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    with open(sys.argv[1], "wb") as file:
        linux.reserve(file.fileno(), 8192)
except OSError as error:
    print(type(error).__name__, error.strerror)
"""


def test_reserve_fails_where_there_is_no_room(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path / "f")], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "OSError File too large\n"


def test_a_memory_file_system_is_local_and_proc_is_not():
    assert linux.is_local_file_system(Path("/dev/shm"))
    assert not linux.is_local_file_system(Path("/proc"))


def test_a_path_that_is_not_there_is_not_local(tmp_path):
    assert not linux.is_local_file_system(tmp_path / "none")


def test_nothing_is_local_where_the_system_cannot_tell(monkeypatch):
    monkeypatch.setattr(linux, "_libc", lambda: None)
    assert not linux.is_local_file_system(Path("/dev/shm"))


def test_starting_write_back_leaves_the_bytes_as_they_are(system, tmp_path):
    with open(tmp_path / "f", "wb") as file:
        file.write(b"abc")
        file.flush()
        linux.start_write_back(file.fileno(), 0, 3)
    assert (tmp_path / "f").read_bytes() == b"abc"


def test_unmapped_pages_leave_the_process_and_keep_their_bytes(tmp_path):
    size, rest = 8 << 20, 100
    with open(tmp_path / "f", "w+b") as file:
        file.truncate(size)
        with mmap.mmap(file.fileno(), size) as memory:
            memory[:] = b"x" * size
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            before = Path("/proc/self/smaps").read_text()
            linux.unmap_pages(address + rest, size - 2 * rest)
            after = Path("/proc/self/smaps").read_text()
            assert _resident(before, address) == size
            assert _resident(after, address) == 2 * os.sysconf("SC_PAGE_SIZE")  # of which the range is a part
            assert memory[:] == b"x" * size


def _resident(smaps: str, address: int) -> int:
    """Return the bytes of the map at an address that this process has."""
    lines = iter(smaps.splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Rss:"))
    raise AssertionError("no such map")
