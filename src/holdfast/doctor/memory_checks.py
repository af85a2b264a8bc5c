"""Checks of memory: the size of /dev/shm against what saves need, and how much memory a process may lock."""

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
