"""What is installed, in words."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spmd.enable import SWITCH
from holdfast.spmd.patches.functions import WHY
from holdfast.spmd.patches.methods import METHODS, stands
from holdfast.spmd.sharding.gather_fallback import GATHERED

LOSSES = (
    "torch's loss_parallel lacks label smoothing and means on several axes, and hangs with fewer classes than ranks"
)


@dataclass(frozen=True, slots=True)
class Line:
    """One operator: its rule, what may stay sharded, and why the rule exists; or why it was left out."""

    operator: str
    family: str
    placements: str
    why: str
    is_installed: bool


def report() -> list[Line]:
    """Every rule that is on, every operator that fell back to gathering, and what was left out, with the reason."""
    lines = [Line(str(op), rule.family, rule.placements, rule.why, True) for op, rule in SWITCH.rules.items()]
    lines += [
        Line(
            name,
            "fallback",
            "none: gathered, computed on every rank",
            f"{found.calls} calls so far, the first of {found.first}",
            True,
        )
        for name, found in GATHERED.items()
    ]
    if SWITCH.methods:
        lines += [Line(stand.title, "methods", "any", stand.why, True) for stand in stands()]
        lines += [Line(f"DTensor.{name}", "methods", "any", why, True) for name, (_, why) in METHODS.items()]
    lines += [
        Line(f"functional.{name}", "functions", "as its rule", WHY[name], True) for name in WHY if SWITCH.functions
    ]
    lines += [
        Line(f"loss_parallel: {op}", "loss", "classes, by any axes; batch beside them", LOSSES, True)
        for op in SWITCH.losses
    ]
    lines += [Line(name, "", "", why, False) for name, why in SWITCH.left_out]
    return sorted(lines, key=lambda line: (not line.is_installed, line.family, line.operator))
