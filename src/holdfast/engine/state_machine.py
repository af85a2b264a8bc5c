"""Explicit state machines: an Enum of states, a table of allowed transitions, one method that moves."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Generic, TypeVar

State = TypeVar("State", bound=Enum)


class IllegalTransition(AssertionError):
    """A transition that the table does not allow: a bug in Holdfast."""


class StateMachine(Generic[State]):
    """A state that changes only by the transitions of a table. Threads may call it."""

    def __init__(self, start: State, transitions: Mapping[State, Collection[State]]) -> None:
        self._state = start
        self._transitions = transitions
        self._lock = threading.Lock()

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_final(self) -> bool:
        """True if no transition leads out of the state."""
        return not self._transitions[self._state]

    def move(self, to: State) -> bool:
        """Move to a state. Return False if the state is final: another thread came first."""
        with self._lock:
            if self.is_final:
                return False
            if to not in self._transitions[self._state]:
                raise IllegalTransition(f"{type(to).__name__}: {self._state.name} -> {to.name} is not allowed")
            self._state = to
            return True
