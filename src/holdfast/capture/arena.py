"""The trainer's arena of a rank: allocated and page-locked on a thread, marked as being filled or sealed, freed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from holdfast.capture.cuda_threads import current_device, enter_thread, uses_cuda
from holdfast.checkpoint.shared_memory import Arena, create_file, seal, unlink_file
from holdfast.core.errors import HoldfastError, StorageError
from holdfast.storage import linux
from holdfast.writer.arena_card import card_path, has_card

_SLICE_BYTES = 256 << 20
_THREADS = 8


class RankArena:
    """One arena for all saves of a run; it grows when a plan needs more.

    Allocation takes seconds: it reserves space, faults in the pages, and page-locks them if there
    is a GPU. `prepare` allocates on a thread; `require` waits for it.
    """

    def __init__(self, prefix: str, limit_bytes: int | None, deadline_s: float, created: Callable[[str], None]) -> None:
        self._prefix = prefix
        self._created = created  # called with the path once the file exists, before it is filled
        self._limit_bytes = limit_bytes
        self._deadline_s = deadline_s
        self._arena: Arena | None = None
        self._pinned: int | None = None
        self._pin_tried = False
        self._thread: threading.Thread | None = None
        self._closed = False
        self.problem = ""
        self.seconds = 0.0

    @property
    def path(self) -> str | None:
        return self._arena.path if self._arena else None

    @property
    def size(self) -> int:
        return self._arena.bytes.size if self._arena else 0

    @property
    def memory(self) -> torch.Tensor:
        assert self._arena is not None
        return torch.from_numpy(self._arena.bytes)

    def prepare(self, size: int, made: Callable[[], None] = lambda: None) -> None:
        """Start to allocate an arena of at least `size` bytes, unless there is one or one is in progress."""
        if self._thread is None and size > self.size and not self._too_large(size):
            self._thread = threading.Thread(target=self._make_quietly, args=(size, made, current_device()), daemon=True)
            self._thread.start()

    def require(self, size: int) -> tuple[str, torch.Tensor]:
        """Return the path and bytes of an arena of at least `size`, allocating it now if necessary."""
        if self._thread is not None:
            self._thread.join(self._deadline_s)
            if self._thread.is_alive():
                raise StorageError(f"the arena was not allocated within {self._deadline_s:.0f} s")
            self._thread = None
        if size > self.size or self._arena is None:
            if self._too_large(size):
                raise StorageError(
                    f"capturing the state of this rank takes {size} bytes of shared memory, "
                    f"but arena_bytes allows only {self._limit_bytes}"
                )
            self._make(size)
        assert self._arena is not None
        self._pin_once()  # CUDA may have been started since the arena was made
        return self._arena.path, self.memory

    def _too_large(self, size: int) -> bool:
        return self._limit_bytes is not None and size > self._limit_bytes

    def _make_quietly(self, size: int, made: Callable[[], None], device: int | None) -> None:
        try:
            enter_thread(device)
            self._make(size)
            made()
        except (HoldfastError, OSError, RuntimeError) as error:
            self.problem = f"the arena was not allocated in advance: {error}"  # `require` tries again

    def _make(self, size: int) -> None:
        started = time.monotonic()
        self.release()
        if self._closed:
            raise StorageError("the Checkpointer is closed")
        path = create_file(max(size, 1), self._prefix, in_memory=True)
        self._created(path)
        arena = Arena(path, max(size, 1), hold=True, owner=True)
        address = arena.bytes.ctypes.data
        with ThreadPoolExecutor(_THREADS) as pool:
            for begin in range(0, size, _SLICE_BYTES):
                pool.submit(linux.populate, address + begin, min(_SLICE_BYTES, size - begin), write=True)
        self._arena = arena
        if self._closed:
            self.release()
            raise StorageError("the Checkpointer was closed in the meantime")
        self._pin_once()
        self.seconds = time.monotonic() - started

    def _pin_once(self) -> None:
        """Page-lock the arena if this process uses CUDA, unless that was tried before."""
        if self._arena is None or self._pin_tried or not uses_cuda():
            return
        self._pin_tried = True
        address, size = self._arena.bytes.ctypes.data, self._arena.bytes.size
        code = torch.cuda.cudart().cudaHostRegister(address, size, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            self._pinned = address
        else:
            self.problem = f"cannot page-lock {size} bytes (CUDA error {int(code)}; check ulimit -l): saves are slower"

    def has_card(self) -> bool:
        """Return True if the arena keeps a captured state that was not written."""
        return self._arena is not None and has_card(self._arena.path)

    def invalidate(self) -> None:
        """Mark the arena as being filled: nothing may be read or restored from it until it is sealed."""
        if self._arena is not None:
            unlink_file(card_path(self._arena.path))
            seal(self._arena.bytes, "")

    def seal(self, attempt: str) -> None:
        """Mark the arena as holding all of an attempt: the writers of this host may read it."""
        assert self._arena is not None
        seal(self._arena.bytes, attempt)

    def release(self) -> None:
        """Free the memory, even if no writer ever opened it."""
        if self._arena is None:
            return
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None
        self._pin_tried = False
        self.invalidate()
        unlink_file(self._arena.path)
        self._arena.close()
        self._arena = None

    def close(self, timeout_s: float, *, leave: bool) -> tuple[str, int] | None:
        """Free the memory, or `leave` it to the writer, which deletes it when it exits.

        An arena with a card also stays: it keeps unwritten state for the next start. Returns the path
        and size of an arena that stays.
        """
        self._closed = True
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._arena is None or not (leave or self.has_card()):
            self.release()
            return None
        kept = self._arena.path, self.size
        self._detach()
        return kept

    def _detach(self) -> None:
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)  # type: ignore[no-untyped-call]
            self._pinned = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
