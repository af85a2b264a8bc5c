"""Portions passed from rank to rank: everybody who needs one gets it once, and nobody waits for ever."""

from __future__ import annotations

import random

import pytest

from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.load_plan import Portion, StoredBlock, StoredFile, Want
from holdfast.plan.passing import OncePlan, SharedWants, Transfer, plan_once, transfers_of


def random_plan(seed: int) -> OncePlan:
    rng = random.Random(seed)
    hosts = [rng.choice("abcd") for _ in range(rng.randint(2, 9))]
    place = Place(TensorSpec("w", dtype_named("uint8"), (4096,)), "file", 0)
    file = StoredFile("file", tuple(StoredBlock(at, 512, "digest") for at in range(0, 4096, 512)), (place,))
    wants = []
    for rank in range(len(hosts)):
        if rng.random() < 0.9:
            begin = rng.choice([0, 0, rng.randrange(4096)])
            wants.append(Want(place, Box((begin,), (4096 - begin,)), rank))
    return plan_once([file], SharedWants(wants, hosts), hosts, verify=rng.random() < 0.5, portion_bytes=128)


def needing(plan: OncePlan, portion: Portion) -> set[int]:
    return {rank for piece in portion.pieces for rank in plan.shared.ranks[piece.rank]}


@pytest.mark.parametrize("seed", range(50))
def test_each_receiver_gets_a_portion_once_and_other_hosts_get_it_once(seed):
    plan = random_plan(seed)
    hosts, reads = plan.hosts, plan.reads
    sent: dict[int, list[tuple[int, int]]] = {}
    expected: dict[int, set[int]] = {}
    for rank in range(len(hosts)):
        for transfer in transfers_of(rank, plan):
            assert {piece.rank for piece in transfer.portion.pieces} <= {rank}
            assert (transfer.sender is None) == (rank == transfer.read.reader)
            sent.setdefault(transfer.number, []).extend((rank, other) for other in transfer.receivers)
            if transfer.sender is not None:
                expected.setdefault(transfer.number, set()).add(rank)
    portions = [(read, portion) for read in reads for portion in read.portions]
    for number, (read, portion) in enumerate(portions):
        pairs = sent.get(number, [])
        receivers = needing(plan, portion) - {read.reader}
        assert sorted(receiver for _, receiver in pairs) == sorted(receivers) == sorted(expected.get(number, ()))
        arriving = [hosts[receiver] for sender, receiver in pairs if hosts[sender] != hosts[receiver]]
        assert len(arriving) == len(set(arriving)), "a host gets a portion from another host once"
    assert sum(plan.bytes_by_host().values()) == sum(read.bytes for read in reads)


@pytest.mark.parametrize("seed", range(50))
def test_ranks_that_send_and_receive_at_once_always_come_to_the_end(seed):
    """Messages without any buffer: both sides must be there. The order of the threads is drawn."""
    plan = random_plan(seed)
    rng = random.Random(seed)
    threads: list[list[tuple[str, int, int, int]]] = []
    for rank in range(len(plan.hosts)):
        transfers = transfers_of(rank, plan)
        for is_own in (True, False):
            threads.append([step for one in transfers if (one.sender is None) == is_own for step in _steps(rank, one)])
    while any(threads):
        meeting = [
            (a, b)
            for a in threads
            for b in threads
            if a and b and a[0][0] == "send" and b[0][0] == "receive" and a[0][1:] == b[0][1:]
        ]
        assert meeting, "every rank waits"
        a, b = rng.choice(meeting)
        del a[0], b[0]


def _steps(rank: int, transfer: Transfer) -> list[tuple[str, int, int, int]]:
    received = [] if transfer.sender is None else [("receive", transfer.number, transfer.sender, rank)]
    return received + [("send", transfer.number, rank, other) for other in transfer.receivers]


def test_a_thousand_replicas_are_planned_like_one():
    hosts = [f"host{rank // 8}" for rank in range(1024)]
    place = Place(TensorSpec("w", dtype_named("uint8"), (1 << 20,)), "file", 0)
    blocks = tuple(StoredBlock(at, 1 << 14, "digest") for at in range(0, 1 << 20, 1 << 14))
    wants = [Want(place, Box((0,), (1 << 20,)), rank) for rank in range(1024)]
    shared = SharedWants(wants, hosts)
    assert shared.distinct_bytes == 1 << 20 and shared.bytes_by_host()["host5"] == 8 << 20
    plan = plan_once([StoredFile("file", blocks, (place,))], shared, hosts, verify=True, portion_bytes=1 << 12)
    assert sum(len(portion.pieces) for read in plan.reads for portion in read.portions) == 256
    assert len({hosts[read.reader] for read in plan.reads}) == 64, "the reads are spread over the hosts"
    received = sum(transfer.sender is not None for rank in (0, 77, 1023) for transfer in transfers_of(rank, plan))
    assert received == sum(4 * (read.reader != rank) for rank in (0, 77, 1023) for read in plan.reads)
