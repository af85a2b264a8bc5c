"""Checks of memory: the room in /dev/shm, the limit of a container or job, how much memory a process may lock."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from holdfast.checkpoint.shared_memory import find_files
from holdfast.core.terminal import size_text
from holdfast.doctor.diagnosis import Diagnosis
from holdfast.doctor.run_needs import RunNeeds
from holdfast.writer.arena_card import is_held_file

SHARED_MEMORY = Path("/dev/shm")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 1 << 60  # the kernel writes "max", or a number near the largest
_MAY_LOCK = 1 << 14  # CAP_IPC_LOCK: no limit applies


def check_shared_memory(needs: RunNeeds) -> Diagnosis:
    """Compare the room in /dev/shm with what the captures of this host take.

    Memory that living processes hold counts as room: it may be that of the run itself.
    """
    check = "shared memory"
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return Diagnosis.change(
            check,
            f"{SHARED_MEMORY} is missing or cannot be written: every save blocks",
            "mount a memory file system there",
            f"mount -t tmpfs -o size={_gigabytes(needs.host_bytes)}g,mode=1777 tmpfs {SHARED_MEMORY}",
        )
    status = os.statvfs(SHARED_MEMORY)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    held, left = _arena_bytes()
    room = f"{SHARED_MEMORY} has {size_text(total)}, {size_text(free)} of it free"
    wanted = f"a save needs {size_text(needs.host_bytes)} on each host ({needs.origin})"
    if not needs.origin:
        wanted = f"a save needs as much as the state of a host; below {size_text(needs.host_bytes)} is too small"
    if free + held >= needs.host_bytes:
        known = wanted if needs.origin else "a save needs as much as the state of a host; --state SIZE compares"
        return Diagnosis.ok(check, f"{room}; {known}")
    text = f"{room}, but {wanted}: saves block the training loop"
    if free + held + left >= needs.host_bytes:
        return Diagnosis.change(
            check, text, f"free {size_text(left)} that ended runs left", "holdfast arenas", "holdfast arenas --free all"
        )
    return Diagnosis.change(
        check,
        text,
        "give the host or container more shared memory",
        f"docker run --shm-size={_gigabytes(needs.host_bytes)}g ...",
        f"mount -o remount,size={_gigabytes(needs.host_bytes)}g {SHARED_MEMORY}",
        "Kubernetes: mount an emptyDir with `medium: Memory` at /dev/shm",
    )


def _gigabytes(size: int) -> int:
    """Return whole gigabytes with a fifth to spare."""
    return max(1, -(-size * 6 // 5_000_000_000))


def _arena_bytes() -> tuple[int, int]:
    """Return the bytes of Holdfast's files in shared memory: held by living processes, and left by ended ones."""
    held = left = 0
    for path in find_files(""):
        if path.parent != SHARED_MEMORY:
            continue
        try:
            size = path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue  # deleted during the search
        if is_held_file(path, once=True):
            held += size
        else:
            left += size
    return held, left


def check_memory_limit(needs: RunNeeds) -> Diagnosis:
    """Compare the memory limit of a container or job with what the captures of this host take: they count toward it."""
    check = "memory limit"
    limit = _memory_limit()
    if limit is None:
        return Diagnosis.ok(check, "none on this container or job")
    allowed = f"this container or job may use {size_text(limit)} of memory, shared memory included"
    least = _gigabytes(needs.host_bytes)
    if not needs.origin or limit >= least * 10**9:
        return Diagnosis.ok(check, allowed)
    if limit >= needs.host_bytes:
        return Diagnosis.note(
            check,
            f"{allowed}, and a save alone needs {size_text(needs.host_bytes)} on each host ({needs.origin})",
            f"allow {least} GB on top of what training takes",
        )
    return Diagnosis.change(
        check,
        f"{allowed}, but a save needs {size_text(needs.host_bytes)} on each host ({needs.origin}): "
        "the kernel kills a process that goes beyond the limit",
        f"allow {least} GB on top of what training takes",
        "docker run --memory=...",
        "Slurm: #SBATCH --mem=...",
        "Kubernetes: resources.limits.memory",
    )


def _memory_limit() -> int | None:
    """Return the least memory limit of the control groups of this process, of either version; None without one."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = CONTROL_GROUPS, "memory.max"
        if controllers:
            base, name = CONTROL_GROUPS / "memory", "memory.limit_in_bytes"
        folder = base / path.lstrip("/")  # in a container the path may be the host's: then only the base is there
        for level in (folder, *folder.parents):
            if level.is_relative_to(base):
                limits += _limit_in(level / name)
    return min(limits, default=None)


def _limit_in(file: Path) -> list[int]:
    try:
        text = file.read_text().strip()
    except OSError:
        return []  # the first group of a host has no such file
    return [int(text)] if text.isdigit() and int(text) < _NO_LIMIT else []


def check_page_locking(needs: RunNeeds, *, has_gpus: bool) -> Diagnosis:
    """Compare the limit of locked memory with the arena of a rank, which is page-locked if the rank has a GPU."""
    check = "page-locking"
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or _may_lock():
        return Diagnosis.ok(check, "no limit on locked memory")
    allowed = f"a process may lock {size_text(limit)} (ulimit -l)"
    if not has_gpus:
        return Diagnosis.ok(
            check, f"{allowed}; without a GPU nothing is page-locked (--gpu checks for a run with GPUs)"
        )
    wanted = f"the arena of a rank takes {size_text(needs.rank_bytes)} ({needs.origin})"
    if not needs.origin:
        wanted = f"an arena takes as much as the state of its rank; below {size_text(needs.rank_bytes)} is too small"
    if limit >= needs.rank_bytes:
        return Diagnosis.ok(check, f"{allowed}; {wanted}")
    return Diagnosis.change(
        check,
        f"{allowed}, but {wanted}: copies from the GPU are slower and stall the loop",
        "raise the limit of locked memory, and log in again",
        "ulimit -l unlimited",
        "/etc/security/limits.conf: * - memlock unlimited",
        "docker run --ulimit memlock=-1 ...",
        "systemd and Slurm's slurmd: LimitMEMLOCK=infinity",
    )


def _may_lock() -> bool:
    """Return True if this process has the capability to lock memory without a limit."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) & _MAY_LOCK)
    return False
