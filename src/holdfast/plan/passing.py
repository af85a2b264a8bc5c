"""The routes of portions, where one rank reads for several hosts.

A portion goes from its reader to one rank of every other host that needs it, and from there to the
other ranks of that host. Every rank handles its transfers in the order of their numbers, so that
none waits for a rank that waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.plan.load_plan import Portion, Read


@dataclass(frozen=True, slots=True)
class Transfer:
    """A portion as one rank handles it: from which rank it comes, None if this rank reads it, and to which it goes."""

    number: int
    read: Read
    portion: Portion
    sender: int | None
    receivers: tuple[int, ...]


def transfers_of(rank: int, reads: Sequence[Read], hosts: Sequence[str]) -> list[Transfer]:
    """Return the transfers of a rank, in order; `hosts` are those of all ranks."""
    transfers = []
    numbered = enumerate((read, portion) for read in reads for portion in read.portions)
    for number, (read, portion) in numbered:
        needing = portion.receivers()
        if rank != read.reader and rank not in needing:
            continue
        routes = _routes(number, read.reader, needing, hosts)
        sender = next((other for other, receivers in routes.items() if rank in receivers), None)
        transfers.append(Transfer(number, read, portion, sender, routes.get(rank, ())))
    return transfers


def _routes(number: int, reader: int, needing: set[int], hosts: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Return the receivers of every rank that sends a portion. The ranks of a host take turns by its number."""
    by_host: dict[str, list[int]] = {}
    for rank in sorted(needing - {reader}):
        by_host.setdefault(hosts[rank], []).append(rank)
    routes: dict[int, tuple[int, ...]] = {}
    first = tuple(by_host.pop(hosts[reader], ()))
    for members in by_host.values():
        head = members.pop(number % len(members))
        first += (head,)
        routes[head] = tuple(members)
    return {reader: first, **routes}


def bytes_read_by_host(reads: Sequence[Read], hosts: Sequence[str]) -> Mapping[str, int]:
    """Return how many bytes each host reads from storage."""
    out = dict.fromkeys(hosts, 0)
    for read in reads:
        out[hosts[read.reader]] += read.bytes
    return out
