"""State machines: only the transitions of the table, each state reachable, one winner among threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any

import pytest

from holdfast.engine.flight import FLIGHT_TRANSITIONS, FlightState
from holdfast.engine.memory_tier import MEMORY_TRANSITIONS, MemoryState
from holdfast.engine.planner import PLAN_TRANSITIONS, PlanState
from holdfast.engine.run_engine import RUN_TRANSITIONS, RunState
from holdfast.engine.state_machine import IllegalTransition, StateMachine

TABLES: list[tuple[Enum, Mapping[Any, Collection[Any]], set[Any]]] = [
    (RunState.NEW, RUN_TRANSITIONS, {RunState.CLOSED}),
    (PlanState.UNPLANNED, PLAN_TRANSITIONS, {PlanState.CLOSED}),
    (FlightState.CAPTURING, FLIGHT_TRANSITIONS, {FlightState.COMMITTED, FlightState.FAILED}),
    (MemoryState.UNCLAIMED, MEMORY_TRANSITIONS, set()),
]


@pytest.mark.parametrize(("start", "table", "final"), TABLES, ids=lambda value: type(value).__name__)
def test_tables_name_every_state_and_reach_it(
    start: Enum, table: Mapping[Enum, Collection[Enum]], final: set[Enum]
) -> None:
    assert set(table) == set(type(start))
    reached, waiting = {start}, [start]
    while waiting:
        for state in table[waiting.pop()]:
            if state not in reached:
                reached.add(state)
                waiting.append(state)
    assert reached == set(table)
    assert {state for state in table if not table[state]} == final


def test_only_transitions_of_the_table_are_allowed() -> None:
    machine = StateMachine(FlightState.CAPTURING, FLIGHT_TRANSITIONS)
    with pytest.raises(IllegalTransition, match="CAPTURING -> COMMITTED"):
        machine.move(FlightState.COMMITTED)
    assert machine.state is FlightState.CAPTURING
    assert machine.move(FlightState.WRITING) and machine.state is FlightState.WRITING


def test_a_final_state_stays() -> None:
    machine = StateMachine(FlightState.CAPTURING, FLIGHT_TRANSITIONS)
    assert machine.move(FlightState.FAILED) and machine.is_final
    assert not machine.move(FlightState.WRITING)
    assert machine.state is FlightState.FAILED


def test_one_of_several_threads_moves() -> None:
    for _ in range(50):
        machine = StateMachine(FlightState.CAPTURING, FLIGHT_TRANSITIONS)
        with ThreadPoolExecutor(4) as pool:
            moved = list(pool.map(lambda _, one=machine: one.move(FlightState.FAILED), range(4)))
        assert moved.count(True) == 1
