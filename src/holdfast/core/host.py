"""Which host is this? Processes that answer alike share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

HOST_VARIABLE = "HOLDFAST_HOST"


def host_identity() -> str:
    """The boot and shared-memory identity of this machine, or what HOLDFAST_HOST says."""
    told = os.environ.get(HOST_VARIABLE)
    if told:
        return told
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = Path("/dev/shm")
    identity = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{identity}/{memory.stat().st_dev}" if memory.exists() else f"{identity}/{os.getpid()}"
