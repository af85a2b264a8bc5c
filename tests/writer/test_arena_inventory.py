"""Arenas of this host as states: grouped by run and attempt, with their holders; freed unless a process holds them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.shared_memory import Arena, create_file, unlink_file
from holdfast.core.ranks import HOST_VARIABLE
from holdfast.writer.arena_card import arena_prefix, card_path, pid_namespace
from holdfast.writer.arena_inventory import StateInMemory, free_state, states_in_memory
from tests.writer import two_hosts
from tests.writer.conftest import RUN
from tests.writer.test_messages import GOLDEN
from tests.writer.two_hosts import ATTEMPT

ONE_HOST = (0, 0)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Arenas and cards of two ranks whose trainer is dead."""
    monkeypatch.setenv(HOST_VARIABLE, "north")
    name = f"/dev/shm/holdfast-{RUN}-%d-{2**22}-1-{pid_namespace()}-{secrets.token_hex(16)}"
    paths = [Path(name % rank) for rank in (0, 1)]
    for rank, path in enumerate(paths):
        two_hosts.fill_arena(path, rank, ONE_HOST)
        card = Path(card_path(str(path)))
        card.touch(0o600)
        text = GOLDEN["one host"]["cards"][f"arena-{rank}.card"]
        card.write_text(text.replace(f'"arena-{rank}"', f'"{path}"').replace("a" * 32, RUN))
    yield paths
    for path in paths:
        unlink_file(str(path))
        unlink_file(card_path(str(path)))


def only() -> StateInMemory:
    (state,) = states_in_memory(RUN)
    return state


def test_arenas_of_one_attempt_are_one_state(captured: list[Path]) -> None:
    state = only()
    assert (state.run, state.step, state.attempt, state.ranks) == (RUN, 3, ATTEMPT, (0, 1))
    assert state.paths == tuple(map(str, captured)) and not state.is_held and state.holders == ()
    assert state.size == sum(path.stat().st_blocks * 512 for path in captured) > 0
    assert state.is_unwritten(()) and not state.is_unwritten({ATTEMPT})
    assert state in states_in_memory()


def test_it_is_freed_with_its_cards(captured: list[Path]) -> None:
    assert free_state(only())
    assert states_in_memory(RUN) == []
    assert not any(Path(card_path(str(path))).exists() for path in captured)


def test_what_a_process_took_after_the_list_is_not_freed(captured: list[Path]) -> None:
    state = only()
    arena = Arena(str(captured[1]), 4096, hold=True)
    assert not free_state(state) and all(path.exists() for path in captured)
    assert only().is_held and only().ranks == (0, 1)
    arena.close()


def test_a_state_of_another_host_is_not_freed(captured: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "south")
    assert not free_state(only()) and all(path.exists() for path in captured)


def test_the_holders_of_an_orphan_are_named(orphan: tuple[str, int]) -> None:
    path, pid = orphan
    state = only()
    assert state.is_held and state.holders == (pid,) and state.step is None and state.paths == (path,)
    assert not state.is_unwritten(()) and not free_state(state) and Path(path).exists()


def test_a_new_arena_of_a_living_trainer_is_its_own_before_it_is_locked() -> None:
    path = create_file(4096, arena_prefix(RUN, 5), in_memory=True)
    try:
        state = only()
        assert state.is_held and state.ranks == (5,) and not free_state(state)
        assert os.path.exists(path)
    finally:
        unlink_file(path)
