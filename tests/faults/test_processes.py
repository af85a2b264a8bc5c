"""A slice of the rows that need processes or plain damage; all of them run by `make faults`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import rows_damage, rows_disk, rows_kills, rows_layouts, rows_ranks, rows_short, rows_syscalls, strace
from tests.faults.cases import Wrong
from tests.faults.order import check_order
from tests.faults.row import Tally
from tests.faults.rows_ranks import Blow
from tests.faults.strace import Call

SEED = 20_241

SLICES: dict[str, Callable[[], Tally]] = {
    "system calls": lambda: rows_syscalls.kill_at_system_calls(SEED, writers=2, savers=2),
    "order": lambda: rows_syscalls.order_of_system_calls(SEED),
    "random kills": lambda: rows_kills.random_kills(SEED, 3),
    "endings": lambda: rows_kills.endings(SEED, ["SIGINT", "fsync of safetensors"]),
    "ranks": lambda: rows_ranks.strike_ranks(SEED, [Blow(2, "capturing", "rank")]),
    "size limit": lambda: rows_disk.file_size_limit(SEED, every=6),
    "damage": lambda: rows_damage.damage(SEED, every=40),
    "fallback": lambda: rows_damage.fallback(SEED, 2),
    "layouts": lambda: rows_layouts.layouts(SEED, 0.01),
    "changing states": lambda: rows_layouts.changed_states(SEED, 4),
    "short calls": lambda: rows_short.short_calls(SEED, 1),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SLICES)
def test_a_slice_of_the_table(name: str) -> None:
    tally = SLICES[name]()
    assert tally.good, tally


@pytest.mark.timeout(60)
@pytest.mark.skipif(bool(rows_disk.no_small_disk()), reason=rows_disk.no_small_disk())
def test_a_slice_of_full_disks() -> None:
    assert rows_disk.full_disk(SEED, every=8).good


ROOT = "/run"
GOOD = [
    Call(1, "openat", f'AT_FDCWD, "{ROOT}/.attempt-1/w.safetensors", O_WRONLY|O_CREAT'),
    Call(1, "pwritev", f"5<{ROOT}/.attempt-1/w.safetensors>, ..."),
    Call(1, "fsync", f"5<{ROOT}/.attempt-1/w.safetensors>"),
    Call(1, "fsync", f"6<{ROOT}/.attempt-1>"),
    Call(1, "rename", f'"{ROOT}/.attempt-1", "{ROOT}/step-1"'),
    Call(1, "fsync", f"6<{ROOT}>"),
]


def test_the_right_order_is_taken_for_right() -> None:
    check_order(GOOD, Path(ROOT), "step-1")


@pytest.mark.parametrize("left_out", range(2, len(GOOD)))
def test_an_order_that_lacks_a_call_is_found_out(left_out: int) -> None:
    calls = [call for number, call in enumerate(GOOD) if number != left_out]
    with pytest.raises(Wrong):
        check_order(calls, Path(ROOT), "step-1")


def test_a_trace_is_put_together_from_its_pieces() -> None:
    lines = [
        "7 fsync(5</a>) = 0",
        '8 rename("/a", "/b" <unfinished ...>',
        "7 fsync(6</c>) = -1 EIO (x)",
        "8 <... rename resumed>) = 0",
    ]
    assert list(strace.parse("\n".join(lines))) == [Call(7, "fsync", "5</a>"), Call(8, "rename", '"/a", "/b" ')]
