"""`report()`: a line for every installed rule, every operator gathered so far, and what is not installed."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.spmd.enable import INSTALLED
from holdfast.spmd.patches.functions import WHY
from holdfast.spmd.patches.methods import METHODS, replacements
from holdfast.spmd.sharding.gather_fallback import GATHERED

LOSSES = (
    "torch's loss_parallel lacks label smoothing and means on several axes, and hangs with fewer classes than ranks"
)
PLAIN = "torch refuses plain indices and masks beside a DTensor; the rules treat them as equal on every rank"


@dataclass(frozen=True, slots=True)
class Line:
    """One operator: its family, the dims that may stay sharded, and why the rule exists or is not installed."""

    operator: str
    family: str
    placements: str
    why: str
    is_installed: bool


def report() -> list[Line]:
    """Return a line for every installed rule, every operator gathered so far, and everything that is not installed."""
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
        Line(f"loss_parallel: {op}", "loss_parallel", "classes, by any axes; batch too", LOSSES, True)
        for op in INSTALLED.losses
    ]
    if INSTALLED.plain:
        lines.append(Line("plain integer and bool tensors", "plain", "any", PLAIN, True))
    lines += [Line(_full_name(name, family), family, "", why, False) for name, family, why in INSTALLED.left_out]
    lines += [Line(_full_name(name, family), family, "", "not chosen", False) for name, family in INSTALLED.not_chosen]
    return sorted(lines, key=lambda line: (not line.is_installed, line.family, line.operator))


def _full_name(name: str, family: str) -> str:
    """Return the name of an operator as torch prints it; a whole family keeps its name."""
    return name if name == family else f"aten.{name}"
