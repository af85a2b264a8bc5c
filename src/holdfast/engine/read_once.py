"""The choice whether one host reads for others, by the bytes that several need and the bandwidths of both ways.

Every host can read what its ranks need, or one host can read each byte and pass it on. Passing
pays where many hosts wait for one storage; with fast disks, or a warm page cache, it does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.reading import PORTION_BYTES
from holdfast.core.limits import GB, LOAD_MEMORY_BYTES, MIB
from holdfast.core.ranks import RankLinks, Ranks, run_on_all_ranks
from holdfast.core.threads import cores, run_on_threads
from holdfast.engine.load_wants import LoadWants
from holdfast.engine.options import Bandwidths, LoadOptions
from holdfast.plan.files import aligned_buffer
from holdfast.plan.load_plan import Read
from holdfast.plan.passing import OncePlan, SharedWants, plan_once
from holdfast.plan.staging import MOST_THREADS
from holdfast.storage.open_files import OpenReaders

_WORTH_BYTES = 256 * MIB  # fewer shared bytes are not worth a measurement
_PROBE_BYTES = 32 * MIB
_GAIN = 0.8  # passing on must take at most this part of the time
_PROBE = 2**29  # the number of a message, above those of portions


@dataclass(frozen=True, slots=True)
class ReadOnce:
    """A load in which bytes are passed from host to host: the plan, and the links between the ranks."""

    plan: OncePlan
    links: RankLinks


@dataclass(frozen=True, slots=True)
class HostBytes:
    """The bytes of each host: read if it reads apart, read if bytes are passed on, and needed by all its ranks."""

    apart: Mapping[str, int]
    once: Mapping[str, int]
    needed: Mapping[str, int]

    def apart_s(self, speed: Bandwidths) -> float:
        return max(self.apart.values()) / speed.storage

    def once_s(self, speed: Bandwidths) -> float:
        """Return the seconds of reading and passing on: one thread does both, and a host's ranks pass on, too."""
        received = max(self.needed[host] - self.once[host] for host in self.apart)
        return max(self.once.values()) / speed.storage + max(0, received) / speed.network

    def __str__(self) -> str:
        once = _text(sum(self.once.values()))
        return f"{len(self.apart)} hosts read {_text(sum(self.apart.values()))}, or {once} once"


def choose_read_once(
    ranks: Ranks, wants: LoadWants, reads_here: Sequence[Read], shared: SharedWants, options: LoadOptions
) -> tuple[ReadOnce | None, str]:
    """Choose for all ranks alike, and say why. Collective; measures if no bandwidth is given and much is shared."""
    from holdfast.adapters.comm import TorchRanks
    from holdfast.adapters.loading.device_staging import needs_one_thread

    apart = "every host reads what it needs"
    if not isinstance(ranks, TorchRanks):
        return None, f"{apart}: these ranks cannot pass bytes on"
    hosts, verify = wants.hosts, options.verify
    own = sum(read.bytes for read in reads_here if read.reader == ranks.rank)
    answers = ranks.gather([own, needs_one_thread(wants.targets.requests.devices)])
    if any(one_thread for _, one_thread in answers):
        return None, f"{apart}: a rank is in inference mode, or has tensors on several kinds of devices"
    read_apart = dict.fromkeys(hosts, 0)
    for rank, (size, _) in enumerate(answers):
        read_apart[hosts[rank]] += size
    more_bytes = sum(read_apart.values()) - shared.distinct_bytes
    if options.read_once == "auto" and more_bytes < _WORTH_BYTES:
        return None, f"{apart}: {_text(max(0, more_bytes))} that several hosts read are too few to pass on"
    links = ranks.links()
    plan = plan_once(wants.contents.files, shared, hosts, verify=verify, portion_bytes=PORTION_BYTES)
    count = HostBytes(read_apart, plan.bytes_by_host(), shared.bytes_by_host())
    once = "one host reads each byte and passes it on"
    if options.read_once is True:
        return ReadOnce(plan, links), f"{once}, as requested: {count}"
    speed, source = options.bandwidths, "given"
    if speed is None:
        speed, source = _measure(ranks, links, wants.checkpoint, hosts, reads_here), "measured"
    found = f"storage {_text(speed.storage)}/s and network {_text(speed.network)}/s a host, {source}; {count}"
    if count.once_s(speed) <= _GAIN * count.apart_s(speed):
        return ReadOnce(plan, links), f"{once}: {found}"
    return None, f"{apart}: {found}"


def _measure(
    ranks: Ranks, links: RankLinks, checkpoint: Checkpoint, hosts: Sequence[str], reads_here: Sequence[Read]
) -> Bandwidths:
    """Measure with the first rank of every host at once, as they will read; the slowest host counts."""
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    place = first.index(ranks.rank) if ranks.rank in first else None

    def read() -> float:
        return 0.0 if place is None else _probe_storage(checkpoint, reads_here[place :: len(first)])

    speeds = [speed for speed in run_on_all_ranks(ranks, read) if speed]
    seconds = 0.0
    if place is not None:
        seconds = _probe_network(links, first[(place + 1) % len(first)], first[place - 1])
    links.meet()
    passed = max(ranks.gather(seconds))
    return Bandwidths(min(speeds, default=float(GB)), _PROBE_BYTES / max(passed, 1e-6))


def _probe_storage(checkpoint: Checkpoint, reads: Sequence[Read]) -> float:
    """Read some of these bytes on threads, as a load does; return the bytes per second."""
    parts = [
        (read.file, at, min(MIB, read.offset + read.size - at))
        for read in reads[: _PROBE_BYTES // MIB]
        for at in range(read.offset, read.offset + read.size, MIB)
    ]
    parts = parts[:: max(1, len(parts) // (_PROBE_BYTES // MIB))]
    files = OpenReaders(checkpoint.open_file)

    def run(tasks: Iterator[tuple[str, int, int]]) -> None:
        buffer = aligned_buffer(MIB)
        for name, at, size in tasks:
            with files.using(name) as file:
                file.read_into(at, [buffer[:size].data])

    started = time.perf_counter()
    try:
        threads = files.most_threads([file for file, _, _ in parts], min(MOST_THREADS, cores()), LOAD_MEMORY_BYTES)
        run_on_threads(threads, "holdfast-probe", parts, run)
    finally:
        files.close()
    return sum(size for _, _, size in parts) / max(time.perf_counter() - started, 1e-6)


def _probe_network(links: RankLinks, after: int, before: int) -> float:
    """Send to the next host and receive from the one before; return the seconds."""
    sent, received = aligned_buffer(2 * MIB), aligned_buffer(2 * MIB)
    count = _PROBE_BYTES // sent.nbytes

    def run(tasks: Any) -> None:
        for exchange, rank, buffer in tasks:
            for number in range(count):
                exchange(rank, _PROBE + number, buffer.data)

    started = time.perf_counter()
    run_on_threads(2, "holdfast-probe", [(links.send, after, sent), (links.receive, before, received)], run)
    return time.perf_counter() - started


def _text(size: float) -> str:
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"
