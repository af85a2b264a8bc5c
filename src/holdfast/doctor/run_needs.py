"""`RunNeeds`: the memory and space that saves of a run take, from its newest step or from what the user says."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.checkpoint.catalog import newest_readable
from holdfast.core.errors import StorageError
from holdfast.storage.base import SharedStorage

# Below this, hardly any run has room: a container's /dev/shm has 64 MB unless its size is given.
LEAST_BYTES = 1_000_000_000


@dataclass(frozen=True, slots=True)
class RunNeeds:
    """The size of a run's state, and the hosts and ranks that share it."""

    state_bytes: int
    hosts: int
    ranks: int
    origin: str  # where the size is from, "" if it is not known

    @property
    def host_bytes(self) -> int:
        """The shared memory that the captures of one host take."""
        return -(-self.state_bytes // self.hosts)

    @property
    def rank_bytes(self) -> int:
        """The shared memory that the capture of one rank takes."""
        return -(-self.state_bytes // self.ranks)

    @staticmethod
    def find(storage: SharedStorage | None, state_bytes: int | None, hosts: int) -> RunNeeds:
        """Return the needs of a run: of a state of this size, else of the newest step in the storage."""
        if state_bytes is not None:
            return RunNeeds(state_bytes, hosts, hosts, "--state")
        try:
            newest = None if storage is None else newest_readable(storage, lambda text: None)
        except StorageError:  # check_storage says so
            newest = None
        if newest is None or newest.manifest is None:
            return RunNeeds(LEAST_BYTES, 1, 1, "")
        writer = newest.manifest.writer
        counts = [writer.get(name) for name in ("hosts", "world")]
        saved_hosts, ranks = (value if isinstance(value, int) and value > 0 else 1 for value in counts)
        return RunNeeds(newest.manifest.total_bytes, saved_hosts, ranks, f"step {newest.step}")
