"""The plot of a run (curve.png): panels and ticks, its loss and those of other runs, the stall of each save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.train.metrics import read_metrics
from holdfast.train.png import LETTER_WIDTH, Canvas, Color

_INK, _GREY, _PALE = (40, 44, 52), (120, 126, 136), (226, 229, 234)
_COLOURS: tuple[Color, ...] = ((31, 111, 184), (222, 124, 30), (44, 148, 92), (150, 84, 170))
_SAVE: Color = (196, 62, 70)
_WHITE: Color = (255, 255, 255)
_WIDTH, _HEIGHT = 960, 600
_LEFT, _RIGHT = 90, 30
_TICKS = 5
_GAP = 6  # between a mark and its label


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's loss by step. Later curves are drawn over earlier ones."""

    name: str
    points: Sequence[tuple[int, float]]
    thickness: float = 2.0


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of the plot with axes: steps to the right, values upwards."""

    canvas: Canvas
    top: float
    bottom: float
    steps: tuple[float, float]
    values: tuple[float, float]

    def x(self, step: float) -> float:
        first, last = self.steps
        return _LEFT + (step - first) / max(last - first, 1e-12) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.values
        return self.bottom - (value - low) / max(high - low, 1e-12) * (self.bottom - self.top)

    def axes(self, label: str) -> None:
        for value in ticks(*self.values):
            self.canvas.line([(_LEFT, self.y(value)), (_WIDTH - _RIGHT, self.y(value))], _PALE, 1)
            words = f"{value:g}"
            self.canvas.text(_LEFT - 8 - len(words) * LETTER_WIDTH * 2, self.y(value) - 7, words, _GREY)
        self.canvas.line([(_LEFT, self.bottom), (_WIDTH - _RIGHT, self.bottom)], _GREY, 1)
        self.canvas.text(_LEFT, self.top - 24, label, _INK)

    def step_ticks(self) -> None:
        for step in ticks(*self.steps):
            words = f"{step:g}"
            self.canvas.text(self.x(step) - len(words) * LETTER_WIDTH, self.bottom + 8, words, _GREY)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two numbers."""
    if not high > low:
        return [low]
    rough = (high - low) / _TICKS
    scale = 10.0 ** math.floor(math.log10(rough))
    step = scale * next(round_one for round_one in (1, 2, 5, 10) if round_one * scale >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def draw_run(
    path: Path,
    curves: Sequence[Curve],
    saves: Sequence[tuple[int, float]],
    marks: Sequence[tuple[int, str]] = (),
    title: str = "loss",
) -> None:
    """Draw curves above a panel of saves (step, stall_ms); marks are labeled vertical lines at steps."""
    finite = [(step, value) for curve in curves for step, value in curve.points if math.isfinite(value)]
    canvas = Canvas(_WIDTH, _HEIGHT)
    if not finite:
        canvas.text(_LEFT, 40, "no steps yet", _INK)
        canvas.write(path)
        return
    steps = (min(step for step, _ in finite), max(step for step, _ in finite))
    losses = [value for _, value in finite]
    margin = (max(losses) - min(losses)) * 0.05 or 0.1
    upper = Panel(canvas, 60, 380, steps, (min(losses) - margin, max(losses) + margin))
    upper.axes(title)
    _draw_marks(upper, marks)
    _draw_curves(upper, curves)
    _draw_saves(canvas, upper, saves)
    canvas.write(path)


def _draw_marks(panel: Panel, marks: Sequence[tuple[int, str]]) -> None:
    """Draw vertical lines, and then their labels below each other."""
    for step, _ in marks:
        panel.canvas.line([(panel.x(step), panel.top), (panel.x(step), panel.bottom)], _GREY, 1)
    for row, (step, words) in enumerate(marks):
        width, y = len(words) * LETTER_WIDTH * 2, panel.top + 70 + row * 20
        x = panel.x(step) + _GAP
        if x + width > _WIDTH:
            x = panel.x(step) - _GAP - width
        _label(panel.canvas, x, y, words, _GREY)


def _label(canvas: Canvas, x: float, y: float, words: str, color: Color) -> None:
    """Write words on white, so that no line drawn before crosses them."""
    canvas.box(x - 2, y - 2, len(words) * LETTER_WIDTH * 2 + 2, 18, _WHITE)
    canvas.text(x, y, words, color)


def _draw_curves(panel: Panel, curves: Sequence[Curve]) -> None:
    for index, curve in enumerate(curves):
        color = _COLOURS[index % len(_COLOURS)]
        points = [(panel.x(step), panel.y(value)) for step, value in curve.points if math.isfinite(value)]
        if points:
            panel.canvas.line(points, color, curve.thickness)
        y = panel.top + 10 + index * 22
        x = _WIDTH - _RIGHT - 24 - len(curve.name) * LETTER_WIDTH * 2
        _label(panel.canvas, x, y, curve.name, _INK)
        panel.canvas.line([(x - 36, y + 7), (x - 10, y + 7)], color, curve.thickness)


def _draw_saves(canvas: Canvas, above: Panel, saves: Sequence[tuple[int, float]]) -> None:
    highest = max((stall for _, stall in saves), default=1.0)
    lower = Panel(canvas, 450, 550, above.steps, (0.0, highest * 1.15))
    lower.axes(f"{len(saves)} save{'s' * (len(saves) != 1)}: stall of training in ms")
    for step, stall in saves:
        if above.steps[0] <= step <= above.steps[1]:
            x = lower.x(step)
            canvas.box(x - 3, lower.y(stall), 6, max(1.0, lower.bottom - lower.y(stall)), _SAVE)
            canvas.box(x - 0.5, above.bottom - 6, 1, 6, _SAVE)
    lower.step_ticks()
    canvas.text(_WIDTH - _RIGHT - 4 * LETTER_WIDTH * 2, lower.bottom + 28, "step", _GREY)


def plot_metrics(metrics: Path, picture: Path, title: str = "loss") -> None:
    """Plot a run's metrics file."""
    steps, events = read_metrics(metrics)
    curve = Curve("training", [(record["step"], record["loss"]) for record in steps if _has_loss(record)])
    tested = [(event["step"], event["loss"]) for event in events if event["event"] == "evaluated" and _has_loss(event)]
    saves = stalls(events)
    resumed = [(event["step"], "resumed") for event in events if event["event"] == "resumed"]
    draw_run(picture, [curve, *([Curve("evaluation", tested)] if tested else [])], saves, resumed, title)
    if measured := measure_curves(events):
        draw_run(picture.with_stem(f"{picture.stem}-measures"), measured, saves, resumed, "measures on held-out sets")


def measure_curves(events: Sequence[dict[str, Any]]) -> list[Curve]:
    """Return a curve for the first measure of each held-out set: its values are named "set/measure"."""
    points: dict[str, dict[int, float]] = {}
    chosen: dict[str, str] = {}
    for event in events:
        for name, value in event.items():
            held_out, slash, _ = name.partition("/")
            if event["event"] == "evaluated" and slash and chosen.setdefault(held_out, name) == name:
                points.setdefault(name, {})[event["step"]] = math.nan if value is None else value
    return [Curve(name, sorted(each.items())) for name, each in points.items()]


def stalls(events: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the stall of each saved step in ms; of a step that was saved again after a kill, the later one."""
    return sorted({event["step"]: event["stall_ms"] for event in events if event["event"] == "save"}.items())


def _has_loss(record: dict[str, Any]) -> bool:
    return isinstance(record.get("loss"), int | float)  # null stands for a loss that was not finite
