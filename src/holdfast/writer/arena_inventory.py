"""The arenas on this host, of all runs: the state in each, the processes that hold it; freed unless held."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from holdfast.writer.arena_card import ArenaFile, card_path, find_arenas, is_held_file, read_cards
from holdfast.writer.startup_cleanup import clean_arenas, holders


@dataclass(frozen=True, slots=True)
class StateInMemory:
    """The arenas of a run on this host that hold one state, or that hold none.

    `step` is None if the arenas hold no whole state: their trainer was stopped during a capture, or
    they wait for the next. `holders` are processes of this user and container; a holder elsewhere is not known by id.
    """

    run: str
    step: int | None
    attempt: str
    ranks: tuple[int, ...]
    paths: tuple[str, ...]
    size: int
    is_held: bool
    holders: tuple[int, ...]

    def is_unwritten(self, written: Collection[str]) -> bool:
        """Return True if the state can be restored and none of the `written` attempts committed it."""
        return self.step is not None and self.attempt not in written


def states_in_memory(run: str = "") -> list[StateInMemory]:
    """Return what is in the memory of this host, of all runs or of one."""
    found: dict[tuple[str, str, bool], list[tuple[ArenaFile, int | None]]] = {}
    held: set[tuple[str, str]] = set()
    for arena in find_arenas(run):
        cards = read_cards([Path(card_path(str(arena.path)))])
        is_held = is_held_file(arena.path) or (not cards and arena.is_claimed())
        attempt = cards[0].attempt if cards else ""
        if is_held:
            held.add((arena.run, attempt))
        # The arenas of a state belong together; those without one are each for themselves.
        key = (arena.run, attempt, is_held and not cards)
        found.setdefault(key, []).append((arena, cards[0].step if cards else None))
    return sorted(
        (
            _state(run, attempt, members, is_held=taken or (bool(attempt) and (run, attempt) in held))
            for (run, attempt, taken), members in found.items()
        ),
        key=lambda state: (state.run, -1 if state.step is None else state.step),
    )


def _state(run: str, attempt: str, members: list[tuple[ArenaFile, int | None]], *, is_held: bool) -> StateInMemory:
    members.sort(key=lambda member: member[0].rank)
    arenas = [arena for arena, _ in members]
    paths = [arena.path for arena in arenas]
    ranks = tuple(arena.rank for arena in arenas)
    pids = tuple(holders(paths)) if is_held else ()
    return StateInMemory(run, members[0][1], attempt, ranks, tuple(map(str, paths)), _size(paths), is_held, pids)


def _size(paths: Iterable[Path]) -> int:
    """Return the memory that files take; one that is deleted meanwhile takes none."""
    total = 0
    for path in paths:
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def free_state(state: StateInMemory) -> bool:
    """Free the arenas of a state; return False if a process holds one of them now, or another host's card names it.

    A process that holds one arena needs them all, so then none is freed.
    """
    if any(is_held_file(Path(path)) for path in state.paths):
        return False
    clean_arenas(state.run, keep=lambda path: path not in state.paths)
    return not any(Path(path).exists() for path in state.paths)
