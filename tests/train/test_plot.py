"""Pictures are real PNG files that show what was measured."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from holdfast.train.metrics import Metrics, read_metrics
from holdfast.train.plot import _COLOURS, _SAVE, Curve, draw_run, measure_curves, plot_metrics, stalls, ticks
from holdfast.train.png import _LETTERS, Canvas


def read_png(path: Path) -> np.ndarray:
    """A reader of its own, strict about checksums: the writer must not be its own judge."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    position, chunks = 8, {}
    while position < len(data):
        length, kind = struct.unpack(">I4s", data[position : position + 8])
        body = data[position + 8 : position + 8 + length]
        assert struct.unpack(">I", data[position + 8 + length : position + 12 + length])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        position += 12 + length
    assert list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, color = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, color) == (8, 2)
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * 3)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def has(picture: np.ndarray, color: tuple[int, int, int]) -> int:
    return int((picture == color).all(axis=2).sum())


def test_boxes_and_lines_are_where_they_were_put(tmp_path: Path):
    canvas = Canvas(20, 10)
    canvas.box(2, 3, 5, 4, (255, 0, 0))
    canvas.line([(12, 5), (18, 5)], (0, 0, 255), 1)
    canvas.box(-50, -50, 10, 10, (0, 255, 0))
    canvas.line([(30, 30), (50, 50)], (0, 255, 0))
    canvas.write(tmp_path / "a.png")
    picture = read_png(tmp_path / "a.png")
    assert (picture[3:7, 2:7] == (255, 0, 0)).all()
    assert has(picture, (255, 0, 0)) == 20
    assert picture[5, 15].tolist() != [255, 255, 255]
    assert has(picture, (0, 255, 0)) == 0


def test_letters_are_all_different_and_of_one_size():
    assert len(set(_LETTERS.values())) == len(_LETTERS)
    assert {len(rows) for rows in _LETTERS.values()} == {7}
    assert set("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.-+/()%:") <= set(_LETTERS)


def test_text_leaves_ink(tmp_path: Path):
    canvas = Canvas(40, 20)
    canvas.text(2, 2, "L", (0, 0, 0), size=1)
    canvas.write(tmp_path / "a.png")
    assert has(read_png(tmp_path / "a.png"), (0, 0, 0)) == 6 + 5


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (3, 3, [3]),
        (-0.05, 0.11, [-0.05, 0, 0.05, 0.1]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]):
    assert ticks(low, high) == expected


def test_a_run_shows_its_curves_and_saves(tmp_path: Path):
    one = Curve("one", [(step, 3 - step / 50) for step in range(1, 100)])
    two = Curve("two", [(step, 2 - step / 90) for step in range(50, 100)])
    draw_run(tmp_path / "a.png", [one, two], [(20, 3.0), (40, 9.0)], [(50, "killed")])
    picture = read_png(tmp_path / "a.png")
    assert picture.shape == (600, 960, 3)
    assert has(picture, _COLOURS[0]) > has(picture, _COLOURS[1]) > 200
    assert has(picture, _SAVE) > 300
    draw_run(tmp_path / "b.png", [one], [(20, 3.0)])
    assert has(read_png(tmp_path / "b.png"), _COLOURS[1]) == 0


def test_metrics_become_a_picture_and_nothing_breaks_it(tmp_path: Path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.event("began", 0)
    plot_metrics(tmp_path / "m.jsonl", tmp_path / "empty.png")
    metrics.step(1, loss=float("nan"))
    plot_metrics(tmp_path / "m.jsonl", tmp_path / "nan.png")
    for step in range(1, 6):
        metrics.step(step, loss=1.0)
    metrics.event("save", 3, stall_ms=2.0)
    metrics.event("resumed", 2)
    metrics.event("evaluated", 4, loss=1.5)
    metrics.close()
    plot_metrics(tmp_path / "m.jsonl", tmp_path / "a.png")
    assert has(read_png(tmp_path / "a.png"), _SAVE) > 0


def test_a_label_is_crossed_by_no_line_and_stays_inside(tmp_path: Path):
    for step in (50, 98):
        draw_run(tmp_path / "a.png", [Curve("a", [(1, 2.0), (100, 1.0)])], [], [(step, "killed"), (step, "resumed")])
        draw_run(tmp_path / "b.png", [Curve("a", [(1, 2.0), (100, 1.0)])], [], [(step, ""), (step, "")])
        with_words, without = read_png(tmp_path / "a.png"), read_png(tmp_path / "b.png")
        ys, xs = np.nonzero((with_words != without).any(axis=2))
        line = round(90 + (step - 1) / 99 * 840)
        assert len(xs) and (xs.min() > line or xs.max() < line), "the labels lie on one side of their line"
        label = with_words[ys.min() : ys.max() + 1, xs.min() : xs.max() + 1]
        grid = (label == np.array((226, 229, 234))).all(axis=2)
        assert not grid.all(axis=1).any(), "no line of the grid goes through"


def test_a_step_that_was_saved_again_is_one_save():
    events = [{"event": "save", "step": step, "stall_ms": ms} for step, ms in [(20, 3.0), (40, 5.0), (40, 7.0)]]
    assert stalls([*events, {"event": "resumed", "step": 20}]) == [(20, 3.0), (40, 7.0)]


def test_measures_of_held_out_sets_get_a_picture_with_the_first_of_each(tmp_path: Path):
    metrics = Metrics(tmp_path / "m.jsonl")
    for step, ndcg, rank in [(1, 0.5, 0.25), (2, 0.75, math.nan), (2, 0.875, 0.5)]:
        metrics.step(step, loss=1.0)
        metrics.event("evaluated", step, **{"a/ndcg@10": ndcg, "a/mrr@10": 0.0, "b/spearman": rank})
    metrics.close()
    found = measure_curves(read_metrics(tmp_path / "m.jsonl")[1])
    assert [(curve.name, curve.points) for curve in found] == [
        ("a/ndcg@10", [(1, 0.5), (2, 0.875)]),
        ("b/spearman", [(1, 0.25), (2, 0.5)]),
    ]
    plot_metrics(tmp_path / "m.jsonl", tmp_path / "curve.png")
    colors = read_png(tmp_path / "curve-measures.png").reshape(-1, 3).tolist()
    assert all(list(color) in colors for color in _COLOURS[:2])
