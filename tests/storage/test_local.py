import errno
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.storage import linux
from holdfast.storage.local import LocalReader, LocalStorage, LocalWriter


@pytest.fixture
def storage(tmp_path):
    return LocalStorage(tmp_path)


def publish(storage, folder, files):
    storage.begin(".attempt-1")
    for name, data in files.items():
        storage.put(".attempt-1", name, data)
    storage.publish(".attempt-1", folder)


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_files_are_private_to_the_user_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        storage = LocalStorage(tmp_path / "deep" / "run")
        storage.begin(".attempt-1")
        storage.create(".attempt-1", "tensors", 10)
        storage.put(".attempt-1", "ema/small.json", b"{}")
        storage.publish(".attempt-1", "step-1")
    finally:
        os.umask(before)
    folders = ["deep", "deep/run", "deep/run/step-1", "deep/run/step-1/ema"]
    assert {name: mode(tmp_path / name) for name in folders} == dict.fromkeys(folders, 0o700)
    files = ["tensors", "ema/small.json"]
    assert {name: mode(tmp_path / "deep/run/step-1" / name) for name in files} == dict.fromkeys(files, 0o600)


def test_an_existing_root_keeps_its_mode(tmp_path):
    tmp_path.chmod(0o755)
    LocalStorage(tmp_path).begin(".attempt-1")
    assert mode(tmp_path) == 0o755


def test_a_symbolic_link_is_damage_even_to_a_good_file(storage, tmp_path):
    publish(storage, "step-1", {"f": b"1"})
    (tmp_path / "outside").write_bytes(b"secret")
    for target in (tmp_path / "outside", tmp_path / "none", Path("f"), Path("/dev/zero")):
        link = tmp_path / "step-1" / "link"
        link.symlink_to(target)
        with pytest.raises(Damaged, match="link is a symbolic link, not a file"):
            storage.pin("step-1").open("link")
        with pytest.raises(Damaged, match="symbolic link"):
            storage.read("step-1", "link", 100)
        link.unlink()


def test_a_fifo_is_damage_and_nobody_waits_for_its_writer(storage, tmp_path):
    publish(storage, "step-1", {"f": b"1"})
    os.mkfifo(tmp_path / "step-1" / "pipe")
    with pytest.raises(Damaged, match="pipe is not a regular file"):  # or it would wait for ever
        storage.read("step-1", "pipe", 100)


def test_a_folder_where_a_file_should_be_is_damage(storage, tmp_path):
    publish(storage, "step-1", {"f": b"1"})
    (tmp_path / "step-1" / "sub").mkdir()
    with pytest.raises(Damaged, match="sub is not a regular file"):
        storage.pin("step-1").open("sub")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/full"])
def test_a_device_is_damage(device):
    with pytest.raises(Damaged, match="is not a regular file"):
        LocalReader(Path(device))


def test_a_socket_is_damage(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(Damaged, match="is not a regular file"):
            LocalReader(tmp_path / "s")


def test_opening_what_is_not_a_file_leaks_no_descriptor(storage, tmp_path):
    publish(storage, "step-1", {"f": b"1"})
    os.mkfifo(tmp_path / "step-1" / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(Damaged):
            storage.pin("step-1").open("pipe")
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer, if what another test left was collected


def test_folders_and_links_that_are_not_hidden_are_listed(storage, tmp_path):
    publish(storage, "step-1", {"f": b"1"})
    (tmp_path / ".attempt-2").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("step-2", ".attempt-3", ".removed-4", ".tags", ".policy"):
        (tmp_path / name).symlink_to(tmp_path / "step-1")
    assert storage.folders() == ["step-1", "step-2"]
    assert storage.hidden() == [".attempt-2", ".attempt-3", ".removed-4"]  # settings are never read through a link


def test_a_sweep_leaves_folders_of_other_names(storage, tmp_path):
    for name in (".removed-by-me", ".removed-step-000000000001-0123456z", ".removed-step-000000000001-01234567"):
        (tmp_path / name).mkdir()
    storage.sweep()
    assert storage.hidden() == [".removed-by-me", ".removed-step-000000000001-0123456z"]


def test_only_regular_files_of_one_level_are_listed(storage, tmp_path):
    publish(storage, "step-1", {"f": b"1", "ema/g": b"22"})
    inside = tmp_path / "step-1"
    (inside / "link").symlink_to(inside / "f")
    (inside / "folder-link").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    (inside / "ema" / "deeper").mkdir()
    (inside / "ema" / "deeper" / "h").write_text("x")
    assert storage.files("step-1") == {"ema/g": 2, "f": 1}


def test_a_root_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match=r"listing .*/file: Not a directory"):
        LocalStorage(tmp_path / "file").folders()
    with pytest.raises(StorageError, match="Not a directory"):
        LocalStorage(tmp_path / "file").files("step-1")


def test_an_attempt_is_begun_once(storage, tmp_path):
    storage.begin(".attempt-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"creating the folder .*/file: Not a directory"):
        LocalStorage(tmp_path / "file").begin(".attempt-1")
    with pytest.raises(StorageError, match=r"creating .*\.attempt-1: File exists"):
        storage.begin(".attempt-1")


def test_a_file_is_created_once_and_never_through_a_link(storage, tmp_path):
    storage.begin(".attempt-1")
    storage.put(".attempt-1", "f", b"first")
    (tmp_path / ".attempt-1" / "link").symlink_to(tmp_path / "outside")
    for name in ("f", "link"):
        with pytest.raises(StorageError, match="File exists"):
            storage.create(".attempt-1", name, 10)
    assert not (tmp_path / "outside").exists()
    assert storage.read(".attempt-1", "f", 10) == b"first"


def test_nothing_is_written_through_a_link(storage, tmp_path):
    storage.begin(".attempt-1")
    (tmp_path / "outside").write_bytes(b"mine")
    (tmp_path / ".attempt-1" / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(StorageError, match="for writing"):
        storage.writer(".attempt-1", "link")
    assert (tmp_path / "outside").read_bytes() == b"mine"


def test_discarding_leaves_what_a_link_points_to(storage, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "f").write_text("mine")
    storage.begin(".attempt-1")
    (tmp_path / ".attempt-1" / "link").symlink_to(tmp_path / "outside")
    storage.discard(".attempt-1")
    assert not (tmp_path / ".attempt-1").exists()
    assert (tmp_path / "outside" / "f").read_text() == "mine"


def test_files_are_mapped_where_the_file_system_is_local_only(tmp_path):
    publish(LocalStorage(tmp_path), "step-1", {"f": b"1"})
    for asked, expected in ((None, linux.is_local_file_system(tmp_path)), (True, True), (False, False)):
        reader = LocalStorage(tmp_path, mappable=asked).pin("step-1").open("f")
        reader.close()
        assert reader.mappable is expected


@pytest.mark.parametrize(("offset", "size"), [(0, 4), (3, 1), (100, 1), (2**40, 1)])
def test_a_map_past_the_end_is_damage(storage, offset, size):
    publish(storage, "step-1", {"f": b"123"})
    reader = storage.pin("step-1").open("f")
    with pytest.raises(Damaged, match="ends at 3"):
        reader.map(offset, size)
    reader.close()


def test_a_file_that_shrinks_while_it_is_open_is_damage(storage, tmp_path):
    publish(storage, "step-1", {"f": b"x" * 100})
    reader = storage.pin("step-1").open("f")
    os.truncate(tmp_path / "step-1" / "f", 40)
    with pytest.raises(Damaged, match="ends at 40, 60 bytes too early"):
        reader.read_into(0, [memoryview(bytearray(100))])
    reader.close()


def test_short_reads_and_writes_are_continued(storage, monkeypatch):
    data = [os.urandom(size) for size in (1, 5, 0, 11, 2)]
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: pwritev(fd, [buffers[0][:3]], at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:2]], at))
    storage.begin(".attempt-1")
    storage.create(".attempt-1", "f", 19)
    writer = storage.writer(".attempt-1", "f")
    writer.write(0, [memoryview(part) for part in data])
    writer.close()
    found = [bytearray(len(part)) for part in data]
    reader = storage.take(".attempt-1", "f")
    reader.read_into(0, [memoryview(part) for part in found])
    reader.close()
    assert found == data


# Failures of the system


def test_a_full_disk_names_the_file_and_the_way_out():
    writer = LocalWriter(Path("/dev/full"))
    with pytest.raises(StorageError, match=r"^writing /dev/full at 0: No space left on device; free some space"):
        writer.write(0, [memoryview(b"abc")])
    writer.close()


LIMITED = """
import resource, sys
from pathlib import Path
from holdfast import StorageError
from holdfast.storage.local import LocalStorage
storage = LocalStorage(Path(sys.argv[1]))
storage.begin(".attempt-1")
storage.create(".attempt-1", "small", 4096)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
for work in (
    lambda: storage.create(".attempt-1", "large", 8192),
    lambda: storage.writer(".attempt-1", "small").write(4090, [memoryview(b"123456"), memoryview(b"7")]),
    lambda: storage.put(".attempt-1", "put", bytes(5000)),
):
    try:
        work()
    except StorageError as error:
        print(error)
storage.discard(".attempt-1")
print(storage.files("") if storage.folders() else "clean")
"""


def test_a_file_size_limit_is_a_storage_error_in_each_way_of_writing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    attempt = f"{tmp_path}/.attempt-1"
    assert done.stdout.splitlines() == [
        f"reserving 8192 bytes for {attempt}/large: File too large",
        f"writing {attempt}/small at 4090: File too large",
        f"writing {attempt}/put at 0: File too large",
        "clean",
    ]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "fsync", "open"])
def test_a_failing_call_is_a_storage_error_that_names_the_path(storage, tmp_path, monkeypatch, call, number):
    storage.begin(".attempt-1")

    def failing(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StorageError) as caught:
        storage.put(".attempt-1", "f", b"data")
    assert f"{tmp_path}/.attempt-1/f" in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert ("free some space" in str(caught.value)) is (number in (errno.ENOSPC, errno.EDQUOT))


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_publish_that_fails_before_the_rename_commits_nothing(storage, monkeypatch, call):
    storage.begin(".attempt-1")
    storage.put(".attempt-1", "f", b"data")

    def failing(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(StorageError, match=r"publishing .*/step-1: Input/output error"):
        storage.publish(".attempt-1", "step-1")
    assert storage.folders() == []
    assert storage.files(".attempt-1") == {"f": 4}


def test_a_failed_replacement_leaves_the_older_folder(storage, monkeypatch):
    publish(storage, "step-1", {"f": b"old"})

    def failing(*args, **kwargs):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(linux, "exchange", failing)
    with pytest.raises(StorageError, match="publishing"):
        publish(storage, "step-1", {"f": b"newer"})
    assert storage.read("step-1", "f", 10) == b"old"


def fail_syncs_of(folder, monkeypatch):
    fsync = os.fsync

    def failing(descriptor):
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)


@pytest.mark.parametrize("older", [{}, {"f": b"old"}], ids=["new", "replacing"])
def test_a_publish_whose_last_sync_fails_is_undone(storage, tmp_path, monkeypatch, older):
    if older:
        publish(storage, "step-1", older)
    fail_syncs_of(tmp_path, monkeypatch)
    with pytest.raises(StorageError, match="publishing"):
        publish(storage, "step-1", {"f": b"newer"})
    assert storage.folders() == (["step-1"] if older else [])
    assert storage.files(".attempt-1") == {"f": 5}
    assert not older or storage.read("step-1", "f", 10) == b"old"


def test_nothing_is_discarded_before_the_root_is_certain(storage, tmp_path, monkeypatch):
    storage.begin(".attempt-1")
    storage.put(".attempt-1", "f", b"data")
    with monkeypatch.context() as patch:
        fail_syncs_of(tmp_path, patch)
        storage.discard(".attempt-1")
    (left,) = storage.hidden()
    assert storage.files(left) == {"f": 4}
    storage.sweep()
    assert storage.hidden() == []


def test_publishing_works_where_there_is_no_exchange(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(linux, "_libc", lambda: None)
    publish(storage, "step-1", {"f": b"old", "g": b"1"})
    publish(storage, "step-1", {"f": b"newer"})
    assert storage.files("step-1") == {"f": 5}
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_missing_root_is_not_found_when_reading(tmp_path):
    with pytest.raises(NotFound):
        LocalStorage(tmp_path / "none").read("step-1", "f", 1)


# The order of a commit, as the system sees it

COMMIT = """
import sys
from pathlib import Path
from holdfast.storage.local import LocalStorage
root = Path(sys.argv[1])
storage = LocalStorage(root / "new-root")
for data in (b"first", b"second"):
    storage.begin(".attempt-1")
    storage.create(".attempt-1", "tensors", len(data))
    storage.create(".attempt-1", "ema/tensors", len(data))
    for name in ("tensors", "ema/tensors"):
        writer = storage.writer(".attempt-1", name)
        writer.write(0, [memoryview(data)])
        writer.sync()
        writer.close()
    storage.put(".attempt-1", "holdfast.json", b"{}")
    storage.publish(".attempt-1", "step-1")
"""
CALLS = "pwritev,pwritev2,fsync,rename,renameat,renameat2,mkdir,mkdirat,unlinkat"
SAME = {"pwritev2": "pwritev", "renameat": "rename", "renameat2": "rename", "mkdirat": "mkdir"}  # by architecture


def traced(root, monkeypatch):
    """The calls of COMMIT from strace, as (call, path) with paths relative to the root."""
    log = root.with_name("trace")
    command = ["strace", "-f", "-y", "-qq", "-o", str(log), "-e", f"trace={CALLS}", sys.executable, "-B", "-c", COMMIT]
    subprocess.run([*command, str(root)], check=True, capture_output=True, timeout=60)
    found = []
    for line in log.read_text().splitlines():
        match = re.search(rf"(\w+)\(.*?{re.escape(str(root))}/?([^>\"]*)[>\"](?:, \"([^\"]*)\")?.*= \d", line)
        if match:
            inside = f"{match[2]}/{match[3]}" if match[1] == "unlinkat" else match[2]
            call = "exchange" if "RENAME_EXCHANGE" in line else SAME.get(match[1], match[1])
            found.append((call, inside))
    return found


def wrapped(root, monkeypatch):
    """The calls of COMMIT from this process, recorded on their way to the system."""
    found = []

    def inside(target):
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        return os.path.relpath(path, root).replace(".", "", 1 if path == str(root) else 0)

    def record(module, name):
        call = getattr(module, name)

        def recorded(target, *args, **kwargs):
            where = inside(kwargs["dir_fd"]) + "/" + target if kwargs.get("dir_fd") is not None else inside(target)
            result = call(target, *args, **kwargs)
            found.append(("unlinkat" if name in ("unlink", "rmdir") else name, where))
            return result

        monkeypatch.setattr(module, name, recorded)

    for name in ("pwritev", "fsync", "rename", "mkdir", "unlink", "rmdir"):
        record(os, name)
    record(linux, "exchange")
    monkeypatch.setattr(sys, "argv", ["-c", str(root)])
    exec(COMMIT, {})
    return found


RECORDERS = [wrapped, *([traced] if shutil.which("strace") else [])]


@pytest.fixture(scope="module", params=RECORDERS, ids=lambda recorder: recorder.__name__)
def commits(request, tmp_path_factory):
    """The calls of a first commit, and of a second one that replaces it."""
    root = tmp_path_factory.mktemp("order") / "root"
    root.mkdir()
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = request.param(root, monkeypatch)
    second = len(calls) - calls[::-1].index(("mkdir", "new-root/.attempt-1")) - 1
    return calls[:second], calls[second:]


@pytest.mark.parametrize("which", [0, 1], ids=["first", "replacement"])
@pytest.mark.parametrize("name", ["tensors", "ema/tensors", "holdfast.json"])
def test_each_file_is_written_then_synced_then_its_folder_then_renamed(commits, which, name):
    calls = commits[which]
    path = f"new-root/.attempt-1/{name}"
    order = [
        calls.index(("pwritev", path)),
        calls.index(("fsync", path)),
        calls.index(("fsync", os.path.dirname(path))),
        calls.index((["rename", "exchange"][which], "new-root/.attempt-1")),
    ]
    assert order == sorted(order)


@pytest.mark.parametrize("which", [0, 1], ids=["first", "replacement"])
def test_the_root_is_synced_after_the_rename(commits, which):
    calls = commits[which]
    renamed = calls.index((["rename", "exchange"][which], "new-root/.attempt-1"))
    assert ("fsync", "new-root") in calls[renamed:]


def test_the_subfolder_is_synced_before_the_folder_that_holds_it(commits):
    for calls in commits:
        assert calls.index(("fsync", "new-root/.attempt-1/ema")) < calls.index(("fsync", "new-root/.attempt-1"))


def test_a_new_root_is_synced_into_its_parent_before_the_commit(commits):
    calls = commits[0]
    order = [
        calls.index(("mkdir", "new-root")),
        calls.index(("fsync", "")),
        calls.index(("rename", "new-root/.attempt-1")),
    ]
    assert order == sorted(order)


def test_the_older_folder_is_removed_only_after_the_new_one_is_durable(commits):
    calls = commits[1]
    synced = len(calls) - calls[::-1].index(("fsync", "new-root")) - 1
    removals = [at for at, (call, _) in enumerate(calls) if call == "unlinkat"]
    assert removals
    assert min(removals) > synced > calls.index(("exchange", "new-root/.attempt-1"))
    hidden = calls.index(("rename", "new-root/.attempt-1"))  # the older one, by the name it got in exchange
    assert min(removals) > hidden > calls.index(("exchange", "new-root/.attempt-1"))
