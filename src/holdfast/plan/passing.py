"""The plan of a load in which one rank reads for all hosts, and the routes of what it reads.

Ranks that need the same box of a tensor share one want, so that a plan for a thousand replicas is no
larger than for one. A portion goes from its reader to one rank of every other host that needs it,
and from there to the other ranks of that host. Every rank handles its transfers in the order of
their numbers, so that none waits for a rank that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from holdfast.plan.load_plan import Portion, Read, StoredFile, Want, plan_load


class SharedWants:
    """The wants of all ranks, one for each box, numbered; `ranks` are those that need each."""

    def __init__(self, wants: Iterable[Want], hosts: Sequence[str]) -> None:
        ranks: dict[tuple[object, object], list[int]] = {}
        firsts: list[Want] = []
        for want in wants:
            if not want.box.volume:
                continue
            members = ranks.setdefault((want.place, want.box), [])
            if not members:
                firsts.append(want)
            members.append(want.rank)
        self.ranks = tuple(map(tuple, ranks.values()))
        self.wants = [replace(want, rank=number) for number, want in enumerate(firsts)]
        self._hosts = hosts

    @cached_property
    def distinct_bytes(self) -> int:
        """The bytes of all boxes, each counted once."""
        return sum(map(_bytes, self.wants))

    def bytes_by_host(self) -> Mapping[str, int]:
        """Return the bytes that the ranks of each host need, counted for every rank."""
        out = dict.fromkeys(self._hosts, 0)
        for want, members in zip(self.wants, self.ranks, strict=True):
            for rank in members:
                out[self._hosts[rank]] += _bytes(want)
        return out


def _bytes(want: Want) -> int:
    return want.box.volume * want.place.spec.dtype.bits // 8


@dataclass(frozen=True, slots=True)
class OncePlan:
    """Reads of which each byte is read once. The rank of a piece is the number of a shared want, not a rank."""

    reads: tuple[Read, ...]
    shared: SharedWants
    hosts: Sequence[str]  # of all ranks

    def bytes_by_host(self) -> Mapping[str, int]:
        """Return how many bytes each host reads from storage."""
        out = dict.fromkeys(self.hosts, 0)
        for read in self.reads:
            out[self.hosts[read.reader]] += read.bytes
        return out


def plan_once(
    files: Sequence[StoredFile], shared: SharedWants, hosts: Sequence[str], *, verify: bool, portion_bytes: int
) -> OncePlan:
    """Plan the reads of all hosts; each goes to the host, and there to the rank, with the fewest bytes so far."""
    load = [0] * len(hosts)
    host_load = dict.fromkeys(hosts, 0)
    reads = []
    for read in plan_load(files, shared.wants, verify=verify, portion_bytes=portion_bytes):
        numbers = {piece.rank for portion in read.portions for piece in portion.pieces}
        needing = {rank for number in numbers for rank in shared.ranks[number]}
        reader = min(needing, key=lambda rank: (host_load[hosts[rank]], load[rank], rank))
        load[reader] += read.bytes
        host_load[hosts[reader]] += read.bytes
        reads.append(replace(read, reader=reader))
    return OncePlan(tuple(reads), shared, hosts)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A portion as one rank handles it, with that rank's pieces.

    `sender` is the rank that it comes from, None if this rank reads it; `receivers` are those it goes to.
    """

    number: int
    read: Read
    portion: Portion
    sender: int | None
    receivers: tuple[int, ...]


def transfers_of(rank: int, plan: OncePlan) -> list[Transfer]:
    """Return the transfers of a rank, in order."""
    own = {number for number, members in enumerate(plan.shared.ranks) if rank in members}
    routes: dict[frozenset[int], _Routes] = {}
    transfers = []
    number = -1
    for read in plan.reads:
        for portion in read.portions:
            number += 1
            needed = frozenset(piece.rank for piece in portion.pieces)
            if rank != read.reader and own.isdisjoint(needed):
                continue
            if needed not in routes:
                routes[needed] = _Routes(needed, plan)
            pieces = tuple(replace(piece, rank=rank) for piece in portion.pieces if piece.rank in own)
            sender, receivers = routes[needed].at(rank, read.reader, number)
            transfers.append(Transfer(number, read, replace(portion, pieces=pieces), sender, receivers))
    return transfers


class _Routes:
    """The ranks that need any of some shared wants, by host."""

    def __init__(self, needed: frozenset[int], plan: OncePlan) -> None:
        self._hosts = plan.hosts
        self._members: dict[str, list[int]] = {}
        for rank in sorted({rank for number in needed for rank in plan.shared.ranks[number]}):
            self._members.setdefault(plan.hosts[rank], []).append(rank)

    def at(self, rank: int, reader: int, number: int) -> tuple[int | None, tuple[int, ...]]:
        """Return the sender and the receivers of a portion at a rank."""
        home = self._hosts[reader]
        here = self._hosts[rank]
        neighbors = tuple(other for other in self._members.get(here, ()) if other not in (rank, reader))
        if rank == reader:
            heads = (self._head(host, number) for host in self._members if host != home)
            return None, (*neighbors, *heads)
        if here == home:
            return reader, ()
        head = self._head(here, number)
        return (reader, neighbors) if rank == head else (head, ())

    def _head(self, host: str, number: int) -> int:
        """Return the rank of a host that receives a portion from another; they take turns."""
        members = self._members[host]
        return members[number % len(members)]
