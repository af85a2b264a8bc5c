"""Checks of the storage of a root: kind of file system, behavior as measured in the folder, O_DIRECT, free space."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.core.limits import PAGE_BYTES
from holdfast.core.terminal import size_text
from holdfast.doctor.diagnosis import Diagnosis
from holdfast.doctor.mounts import Mount
from holdfast.doctor.run_needs import RunNeeds
from holdfast.storage import linux
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.storage.uncached import UncachedFile

_DISKS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs"}
_VOLATILE = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
_NETWORK = {
    "nfs",
    "nfs4",
    "lustre",
    "gpfs",
    "ceph",
    "beegfs",
    "cifs",
    "smb3",
    "wekafs",
    "afs",
    "pvfs2",
    "panfs",
    "pnfs",
}
_OF_OBJECTS = ("s3fs", "gcsfuse", "goofys", "rclone", "mountpoint-s3", "geesefs", "blobfuse")
_FEW_FILES = 1000
_SKEW_S = 2.0
_SLOW_FSYNC_S = 0.5
_MOVE = "put the root on a local disk or on a network file system with locks"


def check_storage(storage: SharedStorage, needs: RunNeeds) -> list[Diagnosis]:
    """Check the storage of a root. A temporary folder is created in it and deleted again."""
    if not isinstance(storage, LocalStorage):
        return [_check_object_store(storage)]
    try:
        folder = _nearest(storage.root)
    except OSError as error:
        return [_unwritable(storage.root, error)]
    if not folder.is_dir():
        return [Diagnosis.change("root", f"{folder} is not a folder", "give the folder that a Checkpointer saves to")]
    mount = Mount.of(folder)
    findings = [_check_kind(folder, mount), _check_space(folder, needs, measured=bool(needs.origin))]
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".holdfast-doctor-") as scratch:
            checks: tuple[Callable[[Path], Diagnosis], ...] = (_check_behavior, _check_clock_of_files, _check_direct)
            findings += [check(Path(scratch)) for check in checks]
    except OSError as error:
        findings.append(_unwritable(folder, error))
    return findings


def is_shared(storage: SharedStorage) -> bool:
    """Return True if other hosts can write to the root too: an object store, or a network file system."""
    if not isinstance(storage, LocalStorage):
        return True
    try:
        mount = Mount.of(_nearest(storage.root))
    except OSError:
        return False  # check_storage says so
    return mount is not None and _is_network(mount)


def _nearest(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists; raises PermissionError where that is hidden."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _unwritable(folder: Path, error: OSError) -> Diagnosis:
    return Diagnosis.change(
        "root",
        f"{folder} cannot be written: {error.strerror}",
        "make the folder writable for the user of the run",
        f"chown $USER {folder}",
        f"chmod u+rwx {folder}",
    )


def _is_network(mount: Mount) -> bool:
    return mount.kind in _NETWORK or mount.kind.removeprefix("fuse.") in {"glusterfs", "sshfs", "beegfs", "juicefs"}


def _check_object_store(storage: SharedStorage) -> Diagnosis:
    """Check that an object store answers with these credentials."""
    began = time.monotonic()
    try:
        storage.folders()
    except HoldfastError as error:
        return Diagnosis.change("object store", str(error), "check the address, the network and the credentials")
    milliseconds = 1000 * (time.monotonic() - began)
    return Diagnosis.ok("object store", f"{storage.name} answers in {milliseconds:.0f} ms")


def _check_kind(folder: Path, mount: Mount | None) -> Diagnosis:
    """Judge the kind of file system and its mount options."""
    check = "file system"
    if mount is None:
        return Diagnosis.note(check, f"the file system of {folder} is not known: the system lists no mounts")
    kind, where = mount.kind, f"{folder} is on {mount.kind} ({mount.source} at {mount.point})"
    name = kind.removeprefix("fuse.")
    if "ro" in mount.options:
        return Diagnosis.change(check, f"{where}, read-only", "mount it writable", f"mount -o remount,rw {mount.point}")
    if kind in _VOLATILE:
        return Diagnosis.change(check, f"{where}: its checkpoints are lost with this host", f"{_MOVE}")
    if kind == "overlay":
        return Diagnosis.change(
            check,
            f"{where}: its checkpoints are deleted with the container",
            "mount a volume for the root",
            "docker run -v /data/runs:/runs ...",
        )
    if any(tool in name or tool in mount.source for tool in _OF_OBJECTS):
        return Diagnosis.change(
            check,
            f"{where}: a bucket mounted as files has neither atomic renames nor locks",
            "give the bucket's address as the root",
            "Checkpointer('s3://bucket/run')",
        )
    if kind in {"vfat", "exfat", "msdos", "ntfs", "ntfs3", "fuseblk"}:
        return Diagnosis.change(check, f"{where}: it has no owners and no atomic renames", _MOVE)
    problem = _network_problem(mount)
    if problem is not None:
        return Diagnosis.change(check, f"{where}: {problem[0]}", problem[1], *problem[2:])
    if _is_network(mount):
        return Diagnosis.ok(
            check, f"{where}, a network file system with locks; commits last as its server's fsync does"
        )
    if kind in _DISKS:
        return Diagnosis.ok(check, where)
    return Diagnosis.note(check, f"{where}, which Holdfast is not tested on; the measurements below count")


def _network_problem(mount: Mount) -> tuple[str, ...] | None:
    """Return what is wrong with the options of a network mount, the remedy, and commands; None if nothing is."""
    options, remount = mount.options, "remount it without this option"
    if mount.kind in {"nfs", "nfs4"}:
        for bad in ("nolock", "local_lock=all", "local_lock=flock"):
            if bad in options:
                change = f"mount -o remount,lock {mount.point}"
                return f"mounted with {bad}, so hosts do not see each other's locks", remount, change
        for bad in ("soft", "softerr"):
            if bad in options:
                change = f"umount {mount.point} && mount -o hard {mount.source} {mount.point}"
                return f"mounted with {bad}: a slow server looks like a failed write", "mount it hard", change
    if mount.kind == "lustre" and "flock" not in options:
        change = f"mount -t lustre -o flock {mount.source} {mount.point}"
        return "mounted without flock, so hosts do not see each other's locks", "mount it with -o flock", change
    if mount.kind in {"cifs", "smb3"} and "nobrl" in options:
        return "mounted with nobrl, so hosts do not see each other's locks", remount
    return None


def _check_space(folder: Path, needs: RunNeeds, *, measured: bool) -> Diagnosis:
    """Compare the free space with one more step, which is written before retention deletes an older one."""
    check = "free space"
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if not status.f_blocks:
        return Diagnosis.note(check, f"not known: the file system of {folder} does not say")
    room = f"{size_text(free)} free"
    if status.f_files and status.f_favail < _FEW_FILES:
        return Diagnosis.change(
            check, f"{room}, but only {status.f_favail} more files fit", "delete files", f"df -i {folder}"
        )
    if free < needs.state_bytes:
        size = f"a step takes {size_text(needs.state_bytes)} ({needs.origin})" if measured else "that is too little"
        return Diagnosis.change(
            check,
            f"{room}, but {size}: the next save fails",
            "delete older steps, or use a larger disk",
            f"holdfast gc {folder} --keep 'last(2)' --dry-run",
            f"df -h {folder}",
        )
    if measured:
        return Diagnosis.ok(check, f"{room}, for {free // max(1, needs.state_bytes)} more steps ({needs.origin})")
    return Diagnosis.ok(check, room)


def _check_behavior(scratch: Path) -> Diagnosis:
    """Try what a commit needs: fsync of files and folders, atomic renames and exchanges, locks."""
    check = "fsync, rename, lock"
    try:
        seconds = _time_fsync(scratch)
        problem = _rename_problem(scratch) or _lock_problem(scratch)
    except OSError as error:
        problem = f"{error.strerror} ({error.filename or scratch.parent})"
    if problem:
        return Diagnosis.change(check, problem, _MOVE)
    text = f"as needed; fsync takes {1000 * seconds:.1f} ms"
    if seconds > _SLOW_FSYNC_S:
        return Diagnosis.note(check, f"{text}, which is slow: every commit waits for several")
    return Diagnosis.ok(check, text)


def _time_fsync(scratch: Path) -> float:
    """Write a megabyte; return the seconds that fsync of the file and its folder take."""
    with (scratch / "synced").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        began = time.monotonic()
        os.fsync(file.fileno())
    descriptor = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.monotonic() - began


def _rename_problem(scratch: Path) -> str:
    for name in ("attempt", "step"):
        (scratch / name).mkdir()
        (scratch / name / name).write_bytes(b"")
    linux.exchange(scratch / "attempt", scratch / "step")
    if not (scratch / "step" / "attempt").exists():
        return "two folders cannot be exchanged: a step cannot be replaced"
    os.rename(scratch / "step", scratch / "published")
    if (scratch / "step").exists() or not (scratch / "published" / "attempt").exists():
        return "a folder cannot be renamed: a step cannot be published"
    return ""


def _lock_problem(scratch: Path) -> str:
    path = scratch / "locked"
    first, second = (os.open(path, os.O_CREAT | os.O_RDWR, 0o600) for _ in range(2))
    try:
        linux.lock(first, exclusive=True, once=True)
        if linux.lock(second, exclusive=True, once=True):
            return "it has no locks: retention could delete a step that a process is reading"
    finally:
        os.close(first)
        os.close(second)
    return ""


def _check_clock_of_files(scratch: Path) -> Diagnosis:
    """Compare the time that the file system gives to a new file with the time of this host."""
    check = "time of the file system"
    path = scratch / "time"
    before = time.time()
    path.write_bytes(b"now")
    behind = before - path.stat().st_mtime
    if abs(behind) > _SKEW_S:
        return Diagnosis.change(
            check,
            f"new files are {abs(behind):.0f} s {'older' if behind > 0 else 'newer'} than the time of this host",
            "synchronize the clocks of this host and of the file server",
            "chronyc tracking",
        )
    return Diagnosis.ok(check, "as on this host")


def _check_direct(scratch: Path) -> Diagnosis:
    """Read a file past the page cache, as loads do."""
    path = scratch / "direct"
    path.write_bytes(bytes(range(256)) * (PAGE_BYTES // 256))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        uncached = UncachedFile(descriptor)
        with mmap.mmap(-1, PAGE_BYTES) as buffer, memoryview(buffer) as view:  # its address is that of a page
            try:
                is_read = uncached.read(0, view) == PAGE_BYTES and view == path.read_bytes()
            finally:
                uncached.close()
    finally:
        os.close(descriptor)
    if is_read:
        return Diagnosis.ok("O_DIRECT", "files are read past the page cache")
    return Diagnosis.change(
        "O_DIRECT",
        "files cannot be read past the page cache: loads are slower, and push other data out of memory",
        "put the root on a file system with O_DIRECT: ext4, xfs, btrfs, NFS or Lustre, not overlayfs",
        "docker run -v /data/runs:/runs ...",
    )
