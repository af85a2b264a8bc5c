"""One host reads for the others: each byte comes from storage once in all, and a lost rank fails every rank alike."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.adapters.loading import device_staging
from holdfast.checkpoint.block_reader import BlockReader
from holdfast.engine import read_once
from holdfast.plan.staging import HostStaging
from holdfast.storage.local import LocalStorage
from tests.dist.harness import Victims, run_ranks, tell_parent

pytestmark = pytest.mark.sliced(24)

HOSTS = {4: ["a", "b", "c", "d"], 8: ["a", "a", "b", "b", "c", "c", "d", "d"]}
SHAPES = {"matrix": (1003, 517), "cube": (211, 3, 401), "bias": (7,), "scale": ()}
BYTES = 4 * (1003 * 517 + 211 * 3 * 401 + 7 + 1)
LAYOUTS: dict[str, Any] = {
    "data parallel": ((-1,), [Replicate()]),
    "hsdp": ((2, -1), [Replicate(), Shard(0)]),
    "columns": ((2, -1), [Replicate(), Shard(1)]),
    "columns of all": ((-1,), [Shard(1)]),
}


def tensors(layout: str, world: int, *, zero: bool = False) -> dict[str, DTensor]:
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", tuple(world // (2 * len(shape) - 2 or 1) if size < 0 else size for size in shape))
    torch.manual_seed(0)
    out = {}
    for name, sizes in SHAPES.items():
        full = torch.randn(sizes)
        fitting = [one if one.is_replicate() or one.dim < full.ndim else Replicate() for one in placements]
        out[name] = distribute_tensor(torch.zeros_like(full) if zero else full, mesh, fitting)
    return out


def save(root: Path) -> None:
    torch.manual_seed(0)
    state = {"weights": {name: torch.randn(sizes) for name, sizes in SHAPES.items()}}
    holdfast.Checkpointer(LocalStorage(root), block_bytes=64 * 4096).save(1, state).result()


def restore(root: str, layout: str, world: int, options: dict[str, Any], mappable: bool = True) -> tuple[int, str]:
    checkpointer = holdfast.Checkpointer(LocalStorage(Path(root), mappable=mappable), deadline_s=60)
    state: dict[str, Any] = {"weights": tensors(layout, world, zero=True)}
    assert checkpointer.restore(state, **options) == 1
    for name, truth in tensors(layout, world).items():
        assert torch.equal(state["weights"][name].to_local(), truth.to_local()), name
    report = checkpointer.last_report
    assert report is not None and report.verified == options.get("verify", True)
    return report.read_bytes, report.reading


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("mappable", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("world", HOSTS)
@pytest.mark.parametrize("layout", ["data parallel", "hsdp", "columns"])
def test_the_storage_gives_each_byte_once(
    tmp_path: Path, layout: str, world: int, mappable: bool, verify: bool
) -> None:
    save(tmp_path)
    options = {"read_once": True, "verify": verify}
    figures = run_ranks(world, restore, str(tmp_path), layout, world, options, mappable, hosts=HOSTS[world])
    assert BYTES <= sum(read for read, _ in figures) <= BYTES * 1.05
    assert sum(bool(read) for read, _ in figures) > world // 2, "the ranks share the work"
    assert {text for _, text in figures} == {figures[0][1]}
    assert figures[0][1].startswith("one host reads each byte and passes it on, as requested: 4 hosts read ")


@pytest.mark.full
@pytest.mark.parametrize(
    ("read_once", "passed", "text"),
    [
        ({"storage": "100MB", "network": "10GB"}, True, "storage 0.10 GB/s and network 10.00 GB/s a host, given"),
        ({"storage": "10GB", "network": "100MB"}, False, "storage 10.00 GB/s and network 0.10 GB/s a host, given"),
        ("auto", False, "are too few to pass on"),
        (False, False, ""),
    ],
)
def test_the_choice_follows_the_bandwidths(tmp_path: Path, read_once: Any, passed: bool, text: str) -> None:
    save(tmp_path)
    figures = run_ranks(4, restore, str(tmp_path), "data parallel", 4, {"read_once": read_once}, hosts=HOSTS[4])
    total = sum(read for read, _ in figures)
    assert BYTES <= total <= BYTES * 1.05 if passed else 4 * BYTES <= total
    assert text in figures[0][1]


def restore_measured(root: str, times: float) -> tuple[int, str]:
    read_once._WORTH_BYTES = 0
    read_once._PROBE_BYTES = 4 << 20
    plain = read_once._probe_storage

    def slow(*arguments: Any) -> float:
        return plain(*arguments) / times

    setattr(read_once, "_probe_storage", slow)
    return restore(root, "data parallel", 4, {})


@pytest.mark.full
def test_auto_measures_storage_and_network(tmp_path: Path) -> None:
    save(tmp_path)
    figures = run_ranks(4, restore_measured, str(tmp_path), 1e6, hosts=HOSTS[4])
    assert sum(read for read, _ in figures) <= BYTES * 1.05
    assert figures[0][1].startswith("one host reads each byte and passes it on: storage ")
    assert "B/s a host, measured" in figures[0][1]


@pytest.mark.full
def test_one_host_has_nothing_to_choose(tmp_path: Path) -> None:
    save(tmp_path)
    figures = run_ranks(2, restore, str(tmp_path), "data parallel", 2, {"read_once": True})
    assert [text for _, text in figures] == ["", ""]


@pytest.mark.full
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_hosts_that_need_parts_of_the_same_blocks_read_them_once(tmp_path: Path, verify: bool) -> None:
    save(tmp_path)
    options = {"read_once": True, "verify": verify}
    figures = run_ranks(4, restore, str(tmp_path), "columns of all", 4, options, hosts=HOSTS[4])
    assert BYTES <= sum(read for read, _ in figures) <= BYTES * 1.05


def restore_cast(root: str, inference: bool) -> str:
    state = {"weights": {name: torch.zeros(sizes, dtype=torch.bfloat16) for name, sizes in SHAPES.items()}}
    checkpointer = holdfast.Checkpointer(LocalStorage(Path(root)), deadline_s=60)
    with torch.inference_mode(inference):
        if inference:
            state["weights"] = {name: torch.zeros(sizes, dtype=torch.bfloat16) for name, sizes in SHAPES.items()}
        assert checkpointer.restore(state, cast=True, read_once=True) == 1
    torch.manual_seed(0)
    for name, sizes in SHAPES.items():
        assert torch.equal(state["weights"][name], torch.randn(sizes).bfloat16()), name
    assert checkpointer.last_report is not None
    return checkpointer.last_report.reading


@pytest.mark.full
@pytest.mark.parametrize("inference", [False, True])
def test_casts_and_inference_mode(tmp_path: Path, inference: bool) -> None:
    save(tmp_path)
    texts = run_ranks(4, restore_cast, str(tmp_path), inference, hosts=HOSTS[4])
    assert len(set(texts)) == 1 and texts[0].startswith("every host" if inference else "one host"), texts


def restore_differently(root: str, options: list[dict[str, Any]]) -> str:
    try:
        restore(root, "data parallel", 4, options[dist.get_rank() % 2])
    except holdfast.InvalidArgument as error:
        return str(error)
    raise AssertionError("nobody noticed")


@pytest.mark.full
@pytest.mark.parametrize(
    "options", [[{"read_once": True}, {}], [{"verify": True, "read_once": True}, {"verify": False, "read_once": True}]]
)
def test_ranks_that_ask_for_different_things_are_told_so(tmp_path: Path, options: list[dict[str, Any]]) -> None:
    save(tmp_path)
    answers = run_ranks(4, restore_differently, str(tmp_path), options, hosts=HOSTS[4])
    assert len(set(answers)) == 1 and "the ranks must load with the same options" in answers[0]


def restore_without_buffers(root: str, where: str) -> str:
    class Failing(HostStaging):
        @contextlib.contextmanager
        def lend(self) -> Iterator[Any]:
            with super().lend() as buffers:
                yield Spoilt(buffers) if where == "next" else buffers
                if where == "exit":
                    raise RuntimeError("the device is gone")

    class Spoilt:
        def __init__(self, buffers: Any) -> None:
            self.buffers, self.count = buffers, 0
            self.sent = buffers.sent

        def next(self) -> Any:
            self.count += 1
            if self.count > 2:
                raise RuntimeError("the device is gone")
            return self.buffers.next()

    if dist.get_rank() == 1:
        device_staging.staging_for = lambda *arguments: Failing(2)
    started = time.monotonic()
    try:
        restore(root, "data parallel", 4, {"read_once": True})
    except holdfast.HoldfastError as error:
        assert time.monotonic() - started < 20
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody noticed")


@pytest.mark.full
@pytest.mark.parametrize("where", ["next", "exit"])
def test_a_rank_that_fails_and_lives_fails_all_alike(tmp_path: Path, where: str) -> None:
    save(tmp_path)
    answers = run_ranks(4, restore_without_buffers, str(tmp_path), where, hosts=HOSTS[4])
    assert len(set(answers)) == 1 and "rank 1" in answers[0] and "the device is gone" in answers[0], answers


def restore_damaged(root: str) -> str:
    try:
        restore(root, "data parallel", 4, {"read_once": True})
    except holdfast.Damaged as error:
        return str(error)
    raise AssertionError("damage was not seen")


def test_damage_that_one_host_reads_fails_every_rank(tmp_path: Path) -> None:
    save(tmp_path)
    file = next(tmp_path.rglob("*.safetensors"))
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte[0] ^ 1]))
    answers = run_ranks(4, restore_damaged, str(tmp_path), hosts=HOSTS[4])
    assert len(set(answers)) == 1 and "digest" in answers[0]


def fail_amidst(root: str, victim: int, deadline_s: float, fate: str) -> None:
    plain = BlockReader.fill
    count = 0

    def fill(self: BlockReader, *arguments: Any) -> None:
        nonlocal count
        count += 1
        if self._rank == victim and count == 2:
            if fate == "dies":
                os._exit(9)
            time.sleep(60)
        plain(self, *arguments)

    setattr(BlockReader, "fill", fill)
    checkpointer = holdfast.Checkpointer(LocalStorage(Path(root)), deadline_s=deadline_s)
    state = {"weights": tensors("data parallel", dist.get_world_size(), zero=True)}
    started = time.monotonic()
    try:
        checkpointer.restore(state, read_once=True)
    except holdfast.PeerFailed as error:
        tell_parent((str(error), time.monotonic() - started))
        time.sleep(60)  # a rank that exits would tell the others
    raise AssertionError("nobody noticed")


@pytest.mark.parametrize("world", HOSTS)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("fate", ["dies", "is silent"])
def test_a_host_that_is_lost_fails_every_other_rank_alike(tmp_path: Path, victim: int, fate: str, world: int) -> None:
    save(tmp_path)
    deadline_s = 40.0 if fate == "dies" else 4.0
    victims = Victims(world, fail_amidst, str(tmp_path), victim, deadline_s, fate, hosts=HOSTS[world])
    try:
        answers = [victims.hear_one(rank, 50.0) for rank in range(world) if rank != victim]
    finally:
        victims.kill()
    assert len({text for _, (text, _) in answers}) == 1, answers
    assert "exited, or sent nothing for" in answers[0][1][0]
    if fate == "dies":  # of several silent ranks, the first that another waited for in vain is named
        assert f"rank {victim} exited" in answers[0][1][0]
    assert all(seconds < 20.0 for _, (_, seconds) in answers), answers
