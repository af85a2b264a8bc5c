"""The choice whether one host reads for others, by the bytes that several need and the bandwidths of both ways.

Every host can read what its ranks need, or one host can read each byte and pass it on. Passing
pays where many hosts wait for one storage; with fast disks, or a warm page cache, it does not.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.reading import PORTION_BYTES
from holdfast.core.limits import GB, MIB
from holdfast.core.ranks import RankLinks, Ranks, run_on_all_ranks
from holdfast.core.threads import run_on_threads
from holdfast.engine.options import Bandwidths, LoadOptions
from holdfast.plan.files import aligned_buffer
from holdfast.plan.load_plan import Read, StoredFile
from holdfast.plan.passing import Groups, OncePlan, plan_once
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
    """The bytes that each host reads if it reads apart, and if bytes are passed on."""

    apart: Mapping[str, int]
    once: Mapping[str, int]

    def apart_s(self, speed: Bandwidths) -> float:
        return max(self.apart.values()) / speed.storage

    def once_s(self, speed: Bandwidths) -> float:
        received = max(self.apart[host] - self.once[host] for host in self.apart)
        return max(max(self.once.values()) / speed.storage, received / speed.network)

    def __str__(self) -> str:
        once = _text(sum(self.once.values()))
        return f"{len(self.apart)} hosts need {_text(sum(self.apart.values()))}, {once} of them once"


def choose_read_once(
    ranks: Ranks,
    checkpoint: Checkpoint,
    hosts: Sequence[str],
    files: Sequence[StoredFile],
    reads_here: Sequence[Read],
    groups: Groups,
    options: LoadOptions,
) -> tuple[ReadOnce | None, str]:
    """Choose for all ranks alike, and say why. Collective; measures if no bandwidth is given and much is shared."""
    from holdfast.adapters.comm import TorchRanks

    apart = "every host reads what it needs"
    count = len(set(hosts))
    if not groups.shared_bytes or not isinstance(ranks, TorchRanks):
        return None, f"{apart}: no two of {count} hosts need the same bytes"
    speed, source = options.bandwidths, "given"
    if options.read_once == "auto" and groups.shared_bytes < _WORTH_BYTES:
        return None, f"{apart}: {_text(groups.shared_bytes)} that {count} hosts share are too few to pass on"
    links = ranks.links()
    plan = plan_once(files, groups, hosts, verify=options.verify, portion_bytes=PORTION_BYTES)
    size = _count_bytes(ranks, hosts, reads_here, plan)
    once = "one host reads each byte and passes it on"
    if options.read_once is True:
        return ReadOnce(plan, links), f"{once}, as requested: {size}"
    if speed is None:
        speed, source = _measure(ranks, links, checkpoint, hosts, reads_here), "measured"
    found = f"storage {_text(speed.storage)}/s and network {_text(speed.network)}/s a host, {source}; {size}"
    if size.once_s(speed) <= _GAIN * size.apart_s(speed):
        return ReadOnce(plan, links), f"{once}: {found}"
    return None, f"{apart}: {found}"


def _count_bytes(ranks: Ranks, hosts: Sequence[str], reads_here: Sequence[Read], plan: OncePlan) -> HostBytes:
    """Count the bytes of both ways. Collective: the reads of this host are known here only."""
    own = sum(read.bytes for read in reads_here if read.reader == ranks.rank)
    apart = dict.fromkeys(hosts, 0)
    for rank, size in enumerate(ranks.gather(own)):
        apart[hosts[rank]] += size
    return HostBytes(apart, plan.bytes_by_host())


def _measure(
    ranks: Ranks, links: RankLinks, checkpoint: Checkpoint, hosts: Sequence[str], reads_here: Sequence[Read]
) -> Bandwidths:
    """Measure with the first rank of every host at once, as they will read; the slowest host counts."""
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    place = first.index(ranks.rank) if ranks.rank in first else None

    def read() -> list[float]:
        return [] if place is None else _probe_storage(checkpoint, reads_here[place :: len(first)])

    reads = [answer for answer in run_on_all_ranks(ranks, read) if answer]
    seconds = 0.0
    if place is not None:
        seconds = _probe_network(links, first[(place + 1) % len(first)], first[place - 1])
    links.meet()
    passed = max(ranks.gather(seconds))
    slowest = min((size / max(took, 1e-6) for size, took in reads if size), default=float(GB))
    return Bandwidths(slowest, _PROBE_BYTES / max(passed, 1e-6))


def _probe_storage(checkpoint: Checkpoint, reads: Sequence[Read]) -> list[float]:
    """Read some of these bytes; return their number and the seconds."""
    buffer = aligned_buffer(MIB)
    files = OpenReaders(checkpoint.open_file)
    size, started = 0, time.perf_counter()
    try:
        for read in reads:
            with files.using(read.file) as file:
                for at in range(read.offset, read.offset + read.size, MIB):
                    if size >= _PROBE_BYTES:
                        return [float(size), time.perf_counter() - started]
                    part = buffer[: min(MIB, read.offset + read.size - at)]
                    file.read_into(at, [part.data])
                    size += part.nbytes
    finally:
        files.close()
    return [float(size), time.perf_counter() - started]


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
