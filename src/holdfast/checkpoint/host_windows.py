"""Loads only: ranks of a host pass portions to each other in windows of shared memory, announced by datagrams.

Each rank has a window with a few slots. It reads a portion into a free slot and notifies the
ranks that need it. Each copies its part and replies; then the slot is free again. Messages use
local datagram sockets: the system calls on both sides also make earlier writes to the shared
memory visible to the other process.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from holdfast.checkpoint.shared_memory import Arena, bind_private, create_file, socket_path, unlink_file
from holdfast.core.errors import PeerFailed
from holdfast.core.limits import WINDOWS_BYTES
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.plan.files import RawArray

Receive = Callable[[int, RawArray], None]

_MESSAGE = struct.Struct("<BIII")  # kind, sender, portion, slot
_READY, _FAILED, _TAKEN = 1, 2, 3
_MAX_SLOTS = 16


class WindowExchange:
    """One rank's window, and its messages with the other ranks of the host."""

    def __init__(self, ranks: Ranks, neighbors: Sequence[int], slot_bytes: int, deadline_s: float) -> None:
        self._ranks = ranks
        self._neighbors = [rank for rank in neighbors if rank != ranks.rank]
        self._slot_bytes = slot_bytes
        self._slots = max(2, min(_MAX_SLOTS, WINDOWS_BYTES // (slot_bytes * max(1, len(neighbors)))))
        self._deadline_s = deadline_s
        self._windows: dict[int, RawArray] = {}
        self._paths: dict[int, str] = {}
        self._outbox: list[tuple[int, bytes]] = []
        self._waiting: dict[int, int] = {}  # own slots: the number of receivers that have not replied
        self._expected = 0

    @contextmanager
    def opened(self, expected: int, receive: Receive) -> Iterator[None]:
        """Open the window; on exit, wait until `expected` portions have arrived and all slots are free."""
        self._expected = expected
        self._on_portion = receive
        with ExitStack() as stack:
            self._connect(stack)
            yield
            self._serve_until(lambda: self._expected == 0 and not self._waiting and not self._outbox)
            run_on_all_ranks(self._ranks, lambda: None)

    def _connect(self, stack: ExitStack) -> None:
        size = self._slots * self._slot_bytes

        def create() -> list[str]:
            name = create_file(size)
            stack.callback(unlink_file, name)
            self._windows[self._ranks.rank] = Arena(name, size).bytes
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            self._socket.setblocking(False)
            path = socket_path(name)
            bind_private(self._socket, path)
            stack.callback(path.unlink)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            self._selector.register(self._socket, selectors.EVENT_READ)
            return [name, str(path)]

        places = run_on_all_ranks(self._ranks, create)

        def attach() -> None:
            for rank in self._neighbors:
                name, self._paths[rank] = places[rank]
                self._windows[rank] = Arena(name, size).bytes

        run_on_all_ranks(self._ranks, attach)

    def free_slot(self) -> tuple[int, RawArray]:
        """Return a free slot of this rank's window, waiting until there is one."""
        self._serve_until(lambda: len(self._waiting) < self._slots)
        slot = next(number for number in range(self._slots) if number not in self._waiting)
        return slot, self._slot(self._ranks.rank, slot)

    def announce(self, portion: int, slot: int, receivers: set[int], *, good: bool) -> None:
        """Notify receivers that a portion is in a slot, or that it could not be read."""
        self._waiting[slot] = len(receivers)
        for rank in sorted(receivers):
            self._send(rank, _READY if good else _FAILED, portion, slot)

    def serve(self) -> None:
        """Handle pending messages without waiting."""
        self._flush()
        while self._receive():
            pass

    def _slot(self, rank: int, slot: int) -> RawArray:
        return self._windows[rank][slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def _serve_until(self, met: Callable[[], bool]) -> None:
        end = time.monotonic() + self._deadline_s
        self.serve()
        while not met():
            if time.monotonic() > end:
                raise PeerFailed(f"the other ranks of this host did not answer within {self._deadline_s} s")
            # No event tells when a full mailbox of another rank empties: poll.
            self._selector.select(timeout=0.002 if self._outbox else 1.0)
            self.serve()

    def _send(self, rank: int, kind: int, portion: int, slot: int) -> None:
        self._outbox.append((rank, _MESSAGE.pack(kind, self._ranks.rank, portion, slot)))
        self._flush()

    def _flush(self) -> None:
        while self._outbox:
            rank, message = self._outbox[0]
            try:
                self._socket.sendto(message, self._paths[rank])
            except BlockingIOError:
                return
            except OSError as error:
                raise PeerFailed(f"rank {rank} of this host is gone: {error.strerror}") from error
            self._outbox.pop(0)

    def _receive(self) -> bool:
        try:
            message = self._socket.recv(_MESSAGE.size)
        except BlockingIOError:
            return False
        kind, sender, portion, slot = _MESSAGE.unpack(message)
        if kind == _TAKEN:
            self._waiting[slot] -= 1
            if not self._waiting[slot]:
                del self._waiting[slot]
            return True
        if kind == _READY:
            self._on_portion(portion, self._slot(sender, slot))
        self._expected -= 1
        self._send(sender, _TAKEN, portion, slot)
        return True
