"""metrics.jsonl as it grows: torn lines, restarts, replaced files, hostile values; thinning keeps both extremes."""

import json
from array import array

from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.metrics import Metrics
from holdfast.web.metric_columns import MetricsFile, thin


def lines(path, *records):
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def steps(begin, end, **more):
    return [{"step": step, "loss": 10.0 - step, **more} for step in range(begin, end)]


def test_appended_lines_are_read_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.read()
    assert metrics.columns == {}
    lines(path, *steps(1, 4))
    metrics.read()
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    metrics.read()
    assert metrics.columns["loss"].steps.tolist() == [1, 2, 3]
    with path.open("a") as file:
        file.write('ss": 0.5}\n')
    metrics.read()
    assert metrics.fields(["loss"], 100)["names"] == {"loss": {"step": [1, 2, 3, 4], "value": [9.0, 8.0, 7.0, 0.5]}}
    assert metrics.columns["loss"].after(2) == {"step": [3, 4], "value": [7.0, 0.5]}


def test_what_the_trainer_writes_is_read(tmp_path):
    """A run that was killed after step 5 and resumed from 3: steps 4 and 5 are those of the second start."""
    path = tmp_path / "metrics.jsonl"
    written = Metrics(path)
    written.event("began", 0, layout="one rank")
    for step in range(1, 6):
        written.step(step, loss=float(step))
        if step == 3:
            written.event("save", 3, stall_ms=1.5)
    written.event("resumed", 3, layout="one rank")
    for step in range(4, 7):
        written.step(step, loss=step + 0.5)
    written.close()
    metrics = MetricsFile(path)
    metrics.read()
    assert metrics.columns["loss"].values.tolist() == [1.0, 2.0, 3.0, 4.5, 5.5, 6.5]
    assert metrics.stalls == {3: 1.5}
    assert [(mark.step, mark.kind) for mark in metrics.marks] == [
        (0, "start"),
        (3, "save"),
        (5, "kill"),
        (3, "restore"),
    ]
    assert "2 steps after step 3" in metrics.marks[2].text


def test_a_metric_that_a_restart_no_longer_writes_ends_there(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, *steps(1, 6, old=1.0), {"event": "resumed", "step": 3}, {"step": 4, "loss": 0.0})
    metrics = MetricsFile(path)
    metrics.read()
    assert metrics.columns["old"].steps.tolist() == [1, 2, 3]
    assert metrics.columns["loss"].steps.tolist() == [1, 2, 3, 4]


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(path, *steps(1, 50))
    metrics = MetricsFile(path)
    metrics.read()
    path.write_text("")
    lines(path, *steps(7, 9))
    before = metrics.generation
    metrics.read()
    assert metrics.columns["loss"].steps.tolist() == [7, 8]
    assert metrics.generation > before


def test_hostile_lines_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines(
        path,
        [],
        "text",
        {"step": -1, "loss": 1},
        {"step": True, "loss": 1},
        {"step": 2**60, "loss": 1},
        {"step": 1, "loss": "<b>", "list": [1], "big": 10**400, "flag": True, "none": None},
        {"step": "1", "loss": 1},
        {"event": ["a"], "step": 1},
        {"event": "save", "step": 1, "stall_ms": "x", "at": "y" * 9999},
        {"step": 2, **{f"name{number}": number for number in range(500)}},
    )
    with path.open("a") as file:
        file.write("x" * 1_000_000 + "\n" + '{"step": 3, "loss": 2}\n[' * 3 + "[" * 100_000 + "\n")
    metrics = MetricsFile(path)
    metrics.read()
    assert len(metrics.columns) == 64
    assert metrics.stalls == {}
    assert all(len(mark.text) <= 300 for mark in metrics.marks)
    json.dumps(metrics.fields([], 100), allow_nan=False)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(4, 100))
def test_thinning_keeps_ends_and_extremes(values, points):
    kept_steps, kept = thin(array("q", range(len(values))), array("d", values), points)
    assert len(kept) <= max(points, 4) + 2
    assert (min(kept), max(kept)) == (min(values), max(values))
    assert (kept_steps[0], kept_steps[-1]) == (0, len(values) - 1)
    assert list(kept_steps) == sorted(set(kept_steps))
    assert [values[step] for step in kept_steps] == list(kept)


def test_values_that_are_not_finite_cost_their_own_point_only(tmp_path):
    """Holdfast writes null, other programs NaN: the other values of the line are read, and the log says so once."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step":1,"loss":1.0,"lr":0.1}\n{"step":2,"loss":NaN,"lr":0.2}\n{"step":3,"loss": -Infinity,"lr":0.3}\n'
        '{"step":4,"loss":null,"lr":0.4}\n{"step":5,"loss":2.0,"lr":0.5}\n{"step":6,"loss":null,"note":":NaN"}\n'
        '{"step":7,"loss":NaNs}\n{"step":8,"loss":'
    )
    metrics = MetricsFile(path)
    metrics.read()
    assert metrics.columns["loss"].steps.tolist() == [1, 5]
    assert metrics.columns["lr"].steps.tolist() == [1, 2, 3, 4, 5]
    assert [(mark.step, mark.kind) for mark in metrics.marks] == [(2, "not finite"), (6, "not finite")]
    with path.open("a") as file:
        file.write("3.0}\n")
    metrics.read()
    assert metrics.columns["loss"].steps.tolist() == [1, 5, 8]
