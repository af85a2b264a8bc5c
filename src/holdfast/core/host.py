"""The identity of this host. Processes with equal identities share memory."""

from __future__ import annotations

import os
import socket
from pathlib import Path

HOST_VARIABLE = "HOLDFAST_HOST"


def host_identity() -> str:
    """Return the boot and shared-memory identity of this machine, or the value of HOLDFAST_HOST."""
    override = os.environ.get(HOST_VARIABLE)
    if override:
        return override
    boot = Path("/proc/sys/kernel/random/boot_id")
    memory = Path("/dev/shm")
    identity = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return f"{identity}/{memory.stat().st_dev}" if memory.exists() else f"{identity}/{os.getpid()}"
