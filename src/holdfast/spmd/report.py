"""A report of what is installed."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spmd.enable import INSTALLED
from holdfast.spmd.patches.functions import WHY
from holdfast.spmd.patches.methods import METHODS, replacements
from holdfast.spmd.sharding.gather_fallback import GATHERED

LOSSES = (
    "torch's loss_parallel lacks label smoothing and means on several axes, and hangs with fewer classes than ranks"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One operator: its family, the dims that may stay sharded, and why the rule exists or was left out."""

    operator: str
    family: str
    placements: str
    why: str
    is_installed: bool


def report() -> list[Line]:
    """Return a line for every installed rule, every operator that was gathered so far, and everything left out."""
    lines = [Line(str(op), rule.family, rule.placements, rule.why, True) for op, rule in INSTALLED.rules.items()]
    lines += [
        Line(
            name,
            "fallback",
            "none: gathered, computed on every rank",
            f"{entry.calls} calls so far, the first of {entry.first}",
            True,
        )
        for name, entry in GATHERED.items()
    ]
    if INSTALLED.methods:
        lines += [Line(item.title, "methods", "any", item.why, True) for item in replacements()]
        lines += [Line(f"DTensor.{name}", "methods", "any", why, True) for name, (_, why) in METHODS.items()]
    lines += [
        Line(f"functional.{name}", "functions", "as its rule", WHY[name], True) for name in WHY if INSTALLED.functions
    ]
    lines += [
        Line(f"loss_parallel: {op}", "loss", "classes, by any axes; batch too", LOSSES, True) for op in INSTALLED.losses
    ]
    lines += [Line(name, "", "", why, False) for name, why in INSTALLED.left_out]
    return sorted(lines, key=lambda line: (not line.is_installed, line.family, line.operator))
