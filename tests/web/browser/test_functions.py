"""Functions of the page's scripts that only compute, called in the browser with values from here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.web.browser.window import Window

CALL = "async ([file, name, args]) => (await import(`/static/${file}.js`))[name](...args)"
PLACES = """async ([domain, range, steps, slot, asked]) => {
  const { broken } = await import("/static/scales.js");
  const axis = broken(domain, range, steps, slot);
  return { breaks: axis.breaks.map(({ from, to }) => [from, to]), pieces: axis.pieces, at: asked.map(axis.place) };
}"""
MAPS = """async ([file, name, args]) => [...(await import(`/static/${file}.js`))[name](...args)]"""


@pytest.fixture
def call(window: Window) -> Any:
    window.open()
    return lambda file, name, *args: window.page.evaluate(CALL, [file, name, list(args)])


def test_functions(call: Any, window: Window) -> None:
    """One window for all of them: to open one costs more than the calls."""
    the_curve_that_a_restore_threw_away(call)
    the_step_to_compare_with(call)
    the_layers_that_changed_most(call)
    the_dims_that_are_cut(call)
    what_is_said_of_steps_that_are_gone(call)
    the_preview_names_its_step(window)
    long_stretches_without_steps(window)
    damaged_keys_are_counted(call)
    clocks_that_jump(call)


def the_curve_that_a_restore_threw_away(call: Any) -> None:
    series = {"step": [1, 2, 3, 4, 3, 4, 5, 2, 3], "value": list(range(9))}
    found = call("curve", "lived", call("curve", "stretches", series))
    assert [[step for step, _ in part["kept"]] for part in found] == [[1], [], [2, 3]]
    assert [[step for step, _ in part["undone"]] for part in found] == [[1, 2, 3, 4], [3, 4, 5], []]


def the_step_to_compare_with(call: Any) -> None:
    rows = [{"step": step, "state": "committed", "parent": parent} for step, parent in ((40, 20), (30, 20), (20, 10))]
    assert call("run_model", "stepBefore", rows, rows[0])["step"] == 20
    assert call("run_model", "stepBefore", rows, rows[0] | {"parent": 5})["step"] == 30
    rows[2]["state"] = "damaged"
    assert call("run_model", "stepBefore", rows, rows[0])["step"] == 30
    assert call("run_model", "stepBefore", rows, rows[2]) is None


def the_layers_that_changed_most(call: Any) -> None:
    """The whole layer counts, not its largest tensor; a tensor outside that was zero comes last."""
    result = {
        "layers": ["0", "1"],
        "layer_changes": [0.02, 0.2],
        "cells": [[0.9, 0.01], [0.1, 0.2]],
        "rest": [{"key": "norm.bias", "relative": "Infinity"}, {"key": "head.weight", "relative": 0.1}],
    }
    found = [entry["name"] for entry in call("comparison", "mostChanged", result, 4)]
    assert found == ["layer 1", "head.weight", "layer 0", "norm.bias"]
    nothing = {"layers": ["0"], "layer_changes": [0], "cells": [[0]], "rest": [], "unread": 0}
    assert call("comparison", "changedText", nothing) == "nothing changed"
    assert call("comparison", "changedText", nothing | {"unread": 38}) == "38 tensors could not be read"
    assert call("comparison", "changedText", result | {"unread": 1}).endswith("layer 0; 1 tensor could not be read")


def the_dims_that_are_cut(call: Any) -> None:
    boxes = [{"offsets": [0, at, 0], "sizes": [4, 2, 8]} for at in (0, 2, 4)]
    assert call("boxes", "drawnDims", [4, 6, 8], boxes) == [0, 1]
    boxes = [{"offsets": [0, 0, at], "sizes": [4, 6, 2]} for at in (0, 2, 4)]
    assert call("boxes", "drawnDims", [4, 6, 8], boxes) == [0, 2]
    assert call("boxes", "drawnDims", [6], [{"offsets": [0], "sizes": [6]}]) == [None, 0]


def what_is_said_of_steps_that_are_gone(call: Any) -> None:
    rows, run = [{"step": 50, "parent": 45}], {"events": [], "gone": []}
    outside = "removed by someone outside of Holdfast"

    def said(step: int, policy: str | None, **more: Any) -> str:
        return call(
            "run_model", "goneText", f"step-{step:012d}", rows, {**run, "retention": {"policy": policy}, **more}
        )

    assert said(45, None) == f"Step 45 is gone: {outside}, or before events were kept."
    kept = f"Step 45 is gone: {outside}, or by other rules before: every(15) keeps it."
    assert said(45, "last(1) | every(15)") == kept
    assert said(45, "last(1)") == "Step 45 is gone: deleted, as far as can be told: last(1) did not keep it."
    assert said(45, "last(1)", gone=[{"step": 45, "why": "the reason"}]) == "Step 45 is gone: the reason."
    assert said(12, "last(1)") == f"Step 12 is not in this run: {outside}, or before events were kept, or never saved."


def the_preview_names_its_step(window: Window) -> None:
    kept = {"folder": "a", "keep": True, "why": "last(2)"}
    retention = {"policy": "last(2)", "rows": [kept], "next": ["a"], "next_step": 1250}
    found = window.page.evaluate(MAPS, ["run_model", "leaving", [retention]])
    assert found == [["a", "no longer among last(2) once step 1,250, if that is the next, is committed"]]


def long_stretches_without_steps(window: Window) -> None:
    def axis(steps: list[int], asked: list[float]) -> Any:
        domain = [min(steps), max(steps)]
        return window.page.evaluate(PLACES, [domain, [0, 1000], steps, 7, asked])

    even = axis(list(range(0, 1001, 10)), [0, 500, 1000])
    assert (even["breaks"], even["at"]) == ([], [0, 500, 1000])
    one_apart = axis([0, 900, 910, 920, 1000], [450])
    assert one_apart["breaks"] == [], "ten pixels from step to step are enough to see them"
    steps = [*range(0, 101, 10), *range(40_000, 40_101, 10), *range(90_000, 90_051, 10)]
    found = axis(steps, steps)
    assert found["breaks"] == [[100, 40_000], [40_100, 90_000]]
    assert found["pieces"] == [[0, 100], [40_000, 40_100], [90_000, 90_050]]
    gaps = [after - before for before, after in zip(found["at"], found["at"][1:], strict=False)]
    assert min(gaps) > 7 and max(gaps) < 60, "every step is apart from the next"
    assert (found["at"][0], round(found["at"][-1], 6)) == (0, 1000)


def damaged_keys_are_counted(call: Any) -> None:
    entry = {"keys": [f"k{number}" for number in range(20)], "keys_count": 33_000}
    assert call("verify_panel", "keysText", entry).endswith("k10, k11 and 32,988 more")
    assert call("verify_panel", "keysText", {"keys": [], "keys_count": 7}) == "7 more"
    assert call("verify_panel", "keysText", {"keys": ["a", "b"], "keys_count": 2}) == "a and b"


def clocks_that_jump(call: Any) -> None:
    def gap(*seconds: int) -> Any:
        rows = [{"state": "committed", "created": f"2026-11-19T08:{at // 60:02d}:{at % 60:02d}Z"} for at in seconds]
        return call("run_model", "usualGap", rows)

    assert gap(400, 300, 200, 100) == 100
    assert gap(400, 300, 200, 900, 100, 0) == 100, "the clock was set back once"
    assert gap(100, 200, 300, 400) is None
    assert gap(400, 390, 380, 330, 280, 230, 180) == 10, "of older steps every fifth is left"
    assert call("text", "duration", -30) == "-30.0 s"
