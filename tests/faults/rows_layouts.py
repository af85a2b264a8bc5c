"""Layouts against numpy slicing, and states that change while they are saved: tests, counted as rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import holdfast
from tests.capture.test_training_goes_on import SEEDS, Run
from tests.faults.cases import DEADLINE_S, Lost, Wrong, fresh_root, run_cases
from tests.faults.row import Row, Tally
from tests.props import test_layouts

LAYOUTS = "layouts: uneven, empty, 0-d, 3-axis meshes, strided shards, flat ranges"
CHANGED = "state changed by an optimizer step while it is being saved"
PROPERTIES = {
    test_layouts.test_parts_are_what_numpy_slices: 8_800,
    test_layouts.test_a_save_plan_writes_every_byte_once_from_who_holds_it: 600,
    test_layouts.test_a_load_plan_brings_each_rank_its_boxes_and_reads_no_more: 600,
}


def layouts(seed: int, share: float = 1.0) -> Tally:
    tally = Tally()
    for test, examples in PROPERTIES.items():
        tally += _property(test, max(1, int(share * examples)), seed)
    return tally


def _property(test: Any, examples: int, seed: int) -> Tally:
    """One property with so many examples; each that was tried is a case."""
    inner = test.hypothesis.inner_test
    tried = 0

    def count(data: st.DataObject) -> None:
        nonlocal tried
        tried += 1
        inner(data)

    options = settings(
        max_examples=examples, deadline=None, database=None, print_blob=True, suppress_health_check=list(HealthCheck)
    )
    again = seeded(seed)(options(given(st.data())(count)))

    def case() -> None:
        try:
            again()
        except AssertionError as error:
            raise Wrong("\n".join([str(error), *getattr(error, "__notes__", [])])) from error

    outcome = run_cases(LAYOUTS, seed, [(test.__name__, case)], limit_s=600.0)
    return Tally(tried, tried) if outcome.good else Tally(tried, tried - 1, outcome.lost, outcome.wrong, outcome.hung)


def change_while_saved(checkpointer: holdfast.Checkpointer, step: int, run_seed: int) -> None:
    """Train, save, and train on before the save is done: what is stored is the state at the call."""
    run = Run(run_seed, "cpu")
    for _ in range(run.random.randint(1, 3)):
        run.train()
    expected = [(group, key, value.clone()) for group, key, value in run.tensors()]
    handle = checkpointer.save(step, run.state)
    for _ in range(run.random.randint(1, 3)):
        run.train()
    checkpoint = handle.result(DEADLINE_S)
    if not checkpoint.verify().good:
        raise Lost(f"seed {run_seed}: damaged")
    for group, key, value in expected:
        if checkpoint.read(key, group).tobytes() != value.cpu().numpy().tobytes():
            raise Wrong(f"seed {run_seed}: {group}: {key} is not what it was at the call")


def changed_states(seed: int, count: int = SEEDS) -> Tally:
    with fresh_root() as root, holdfast.Checkpointer(root, deadline_s=DEADLINE_S) as checkpointer:
        seeds = [seed + number for number in range(count)]
        # Like kinds of optimizers follow each other, so that most saves are by a plan that stands.
        cases = [
            (f"seed {run_seed}", partial(change_while_saved, checkpointer, step, run_seed))
            for step, run_seed in enumerate(sorted(seeds, key=lambda run_seed: run_seed % 4))
        ]
        return run_cases(CHANGED, seed, cases)


ROWS = (Row(LAYOUTS, layouts, counted=False), Row(CHANGED, changed_states))
