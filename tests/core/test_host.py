"""The identity of a host: the boot and the shared memory, or what the user says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.core.host import HOST_VARIABLE, host_identity


def test_the_variable_is_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "north")
    assert host_identity() == "north"
    monkeypatch.setenv(HOST_VARIABLE, "")
    assert host_identity() not in ("", "north")


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="needs the boot id of Linux")
def test_the_identity_names_the_boot_and_the_shared_memory() -> None:
    boot, _, memory = host_identity().partition("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert memory == str(os.stat("/dev/shm").st_dev)


def test_without_shared_memory_every_process_is_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda self: False)
    monkeypatch.setattr("socket.gethostname", lambda: "south")
    assert host_identity() == f"south/{os.getpid()}"
