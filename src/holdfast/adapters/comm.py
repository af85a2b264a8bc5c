"""Ranks over torch.distributed: small JSON messages on a group that can carry CPU tensors."""

from __future__ import annotations

import json
import os
import socket
import weakref
import zlib
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.ranks import Alone, Ranks

HOST_VARIABLE = "HOLDFAST_HOST"

# One gloo group per default group: making one is collective and costs connections.
_CPU_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def current_ranks(deadline_s: float) -> Ranks:
    """The ranks of the default process group, or a single process if there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    return TorchRanks(_cpu_group(deadline_s))


def _cpu_group(deadline_s: float) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    if world not in _CPU_GROUPS:
        _CPU_GROUPS[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    return _CPU_GROUPS[world]


class TorchRanks:
    """Ranks that talk through a gloo group of their own, with its own deadline."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        data = json.dumps(value, separators=(",", ":")).encode()
        if len(data) > 4096:
            data = b"z" + zlib.compress(data, 1)
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64), group=self._group)
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = own
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(parts, padded, group=self._group)
        return [_unpack(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def host(self) -> str:
        """The boot and shared-memory identity of this machine, or what HOLDFAST_HOST says."""
        told = os.environ.get(HOST_VARIABLE)
        if told:
            return told
        boot = Path("/proc/sys/kernel/random/boot_id")
        memory = Path("/dev/shm")
        identity = boot.read_text().strip() if boot.exists() else socket.gethostname()
        return f"{identity}/{memory.stat().st_dev}" if memory.exists() else f"{identity}/{os.getpid()}"


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data)
