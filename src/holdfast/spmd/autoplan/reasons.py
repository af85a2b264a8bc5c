"""The reasons of a plan as lines of text: compared streams, and each branch's choice with the next best."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.spmd.autoplan.partition import PlannedBranch
from holdfast.spmd.autoplan.placement_options import PlacementOption
from holdfast.spmd.autoplan.placement_plan import Places
from holdfast.spmd.autoplan.selection import Selection
from holdfast.spmd.autoplan.units import WHOLE

SHOWN = 8  # roles in a line


def reasons(
    selection: Selection,
    stream: Places,
    streams: Sequence[tuple[Places, float, float]],
    unassigned: Sequence[str],
) -> tuple[str, ...]:
    """Return lines that compare the stream with other streams, and each branch with its next best option."""
    others = [
        f"{_placement_text(places)} would move {round(moved)}{' and hold too much' if excess else ''}"
        for places, moved, excess in sorted(streams, key=lambda one: (one[2], one[1]))
        if places != stream
    ]
    lines = [f"between branches {_placement_text(stream)}; {'; '.join(others) or 'nothing else divides'}"]
    for part, option in zip(selection.parts, selection.options, strict=True):
        lines.append(_line(part, option))
    if unassigned:
        more = f" and {len(unassigned) - SHOWN} more" if len(unassigned) > SHOWN else ""
        lines.append(f"whole, since they are in no branch that can be cut: {', '.join(unassigned[:SHOWN])}{more}")
    return tuple(lines)


def _line(part: PlannedBranch, chosen: PlacementOption) -> str:
    times = f" x{part.times}" if part.times > 1 else ""
    line = f"{part.role or 'the model'}{times}: {_weights(chosen, part)}{round(chosen.moved)} bytes"
    rest = [option for option in part.options if option is not chosen]
    if not rest:
        return line
    other = min(rest, key=lambda option: (option.held > chosen.held, option.score))
    more = f", but {round(other.held - chosen.held)} more to hold" if other.held > chosen.held else ""
    return f"{line}; by {_weights(other, part)}it would be {round(other.moved)}{more}"


def _weights(option: PlacementOption, part: PlannedBranch) -> str:
    prefix = f"{part.branch.name}." if part.branch.name else ""
    shown = [
        f"{key.removeprefix(prefix).removesuffix('.weight')} {_placement_text(option.places(key))}"
        for key in option.walks[0].parameters
        if not key.endswith("bias")
    ]
    return f"{', '.join(shown)}: " if shown else ""


def _placement_text(places: Places) -> str:
    return " ".join("R" if place == WHOLE else f"S{place}" for place in places)
