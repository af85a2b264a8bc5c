"""Ranks over torch.distributed, on a gloo group of their own: gathers, maxima and messages, with a deadline."""

from __future__ import annotations

import json
import os
import struct
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from holdfast.core.errors import PeerFailed
from holdfast.core.ranks import RankLinks, Ranks, SingleProcess, host_identity
from holdfast.core.warnings import warn

NOTICE_S = 30.0
_FRAME_BYTES = 2048
_COMPRESS_BYTES = 2048
_LOST = struct.Struct("<q")
_MEETING = 2**30  # above the numbers of all messages

# Why each broken group is unusable. gloo cannot recover from a collective that not all ranks joined.
_BROKEN: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()

# One gloo group per default group and deadline: creating a group is collective and opens connections.
_CPU_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[float, dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def current_ranks(deadline_s: float) -> Ranks:
    """Return the ranks of the default process group, or a single process without one."""
    if not dist.is_available() or not dist.is_initialized():
        return SingleProcess()
    return TorchRanks(_cpu_group(deadline_s), deadline_s)


def _cpu_group(deadline_s: float) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    groups = _CPU_GROUPS.setdefault(world, {})
    if deadline_s not in groups:
        with _waiting_for_others(world, dist.get_rank(), deadline_s):
            groups[deadline_s] = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
    return groups[deadline_s]


@contextmanager
def _waiting_for_others(group: dist.ProcessGroup, rank: int, deadline_s: float) -> Iterator[None]:
    """Warn while the other ranks are late, and raise PeerFailed if they do not arrive."""
    if group in _BROKEN:
        raise PeerFailed(f"the ranks lost contact earlier; restart the run. First failure: {_BROKEN[group]}")
    text = "every rank must call save, load and restore, in the same order"
    notice = threading.Timer(NOTICE_S, warn, [f"rank {rank} is waiting for the other ranks: {text}"])
    notice.daemon = True
    notice.start()
    try:
        yield
    except RuntimeError as error:
        _BROKEN[group] = f"a rank exited, or did not arrive within {deadline_s:.0f} s; {text}{_elastic_advice()}"
        raise PeerFailed(_BROKEN[group]) from error
    finally:
        notice.cancel()


def _elastic_advice() -> str:
    """Name what torch needs for the process groups of a restarted torchrun, where it may be missing."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return ""
    return (
        f". This is restart {restarts} of torchrun: torch's gloo groups may find the addresses of the start before "
        "in the store that torchrun shares; set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    )


class TorchRanks:
    """Ranks that communicate over a dedicated gloo group, with its own deadline."""

    def __init__(self, group: dist.ProcessGroup, deadline_s: float) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        data = json.dumps(value, separators=(",", ":")).encode()
        if len(data) > _COMPRESS_BYTES:
            data = b"z" + zlib.compress(data, 1)
        # Most messages fit into one frame with their length; longer messages need a second gather.
        frames = self._gather_bytes(struct.pack("<Q", len(data)) + data[:_FRAME_BYTES], 8 + _FRAME_BYTES)
        sizes = [struct.unpack("<Q", frame[:8])[0] for frame in frames]
        longest = max(sizes)
        parts = [frame[8:] for frame in frames]
        if longest > _FRAME_BYTES:
            parts = self._gather_bytes(data, longest)
        return [_unpack(part[:size]) for part, size in zip(parts, sizes, strict=True)]

    def _gather_bytes(self, data: bytes, width: int) -> list[bytes]:
        own = torch.frombuffer(bytearray(data.ljust(width, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(width, dtype=torch.uint8) for _ in range(self.world)]
        with _waiting_for_others(self._group, self.rank, self._deadline_s):
            dist.all_gather(parts, own, group=self._group)
        return [part.numpy().tobytes() for part in parts]

    def host(self) -> str:
        return host_identity()

    def links(self) -> RankLinks:
        """Return links for messages between two ranks, on the same group."""
        return TorchLinks(self._group, self._deadline_s)

    def all_max(self, values: Sequence[int]) -> list[int]:
        own = torch.tensor(list(values), dtype=torch.int64)
        with _waiting_for_others(self._group, self.rank, self._deadline_s):
            dist.all_reduce(own, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in own.tolist()]


class TorchLinks:
    """Messages between two ranks. A rank that exited, or did not take part within the deadline, is lost.

    After that no message with it is tried: `send` and `receive` return False at once. The first rank
    that any rank lost is in the store of the default group: gloo closes all connections of a rank
    whose deadline has passed, so that ranks cannot tell each other.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_s: float) -> None:
        self._group = group
        self._deadline_s = deadline_s
        self._rank = dist.get_rank(group)
        self._world = dist.get_world_size(group)
        self._lost: set[int] = set()
        self._first_lost: int | None = None  # of all ranks
        self._cause: RuntimeError | None = None

    def send(self, rank: int, number: int, data: memoryview) -> bool:
        """Send a message and wait until its bytes are no longer needed; returns False if the rank is lost."""
        tensor = _tensor(data)
        return self._try(rank, lambda: dist.send(tensor, group_dst=rank, group=self._group, tag=number))

    def receive(self, rank: int, number: int, data: memoryview) -> bool:
        """Receive a message of exactly this size; returns False if the rank is lost."""
        tensor = _tensor(data)
        return self._try(rank, lambda: dist.recv(tensor, group_src=rank, group=self._group, tag=number))

    def _try(self, rank: int, exchange: Callable[[], object]) -> bool:
        if rank not in self._lost:
            try:
                exchange()
            except RuntimeError as error:
                self._cause = self._cause or error
                self._lose(rank)
        return rank not in self._lost

    def _lose(self, rank: int) -> None:
        """Note a lost rank, and ask which rank was the first that any rank lost."""
        from torch.distributed.distributed_c10d import _get_default_store

        self._lost.add(rank)
        if self._first_lost is None:
            key = f"holdfast lost a rank of {self._group.group_name}"
            try:
                self._first_lost = int(_get_default_store().compare_set(key, "", str(rank)))
            except RuntimeError:  # the store is gone: rank 0, or its host, keeps it
                self._first_lost = 0

    def meet(self) -> None:
        """Wait for all ranks. If any has lost another, every rank raises the same PeerFailed."""
        if self._rank == 0:
            for rank in range(1, self._world):
                self._receive_lost(rank)
            for rank in range(1, self._world):
                self._send_lost(rank)
        else:
            self._send_lost(0)
            self._receive_lost(0)
        if self._first_lost is not None:
            _BROKEN[self._group] = (
                f"rank {self._first_lost} exited, or sent nothing for {self._deadline_s:.0f} s, while the ranks passed "
                "the bytes of a checkpoint to each other (it may itself have waited for another)"
            )
            raise PeerFailed(f"{_BROKEN[self._group]}; restart the run") from self._cause

    def _send_lost(self, rank: int) -> None:
        """Send the first lost rank, or -1."""
        found = -1 if self._first_lost is None else self._first_lost
        self.send(rank, _MEETING, memoryview(bytearray(_LOST.pack(found))))

    def _receive_lost(self, rank: int) -> None:
        data = bytearray(_LOST.size)
        if self.receive(rank, _MEETING, memoryview(data)):
            (found,) = _LOST.unpack(data)
            if found >= 0 and self._first_lost is None:
                self._first_lost = found


def _tensor(data: memoryview) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def _unpack(data: bytes) -> Any:
    return json.loads(zlib.decompress(data[1:]) if data[:1] == b"z" else data)
