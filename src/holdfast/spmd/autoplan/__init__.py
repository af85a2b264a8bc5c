"""Plans: placements for a model's parameters and activations, proposed, printed, applied, saved and loaded."""

from holdfast.spmd.autoplan.apply_plan import distribute
from holdfast.spmd.autoplan.placement_plan import Pins, Plan
from holdfast.spmd.autoplan.proposal import plan
from holdfast.spmd.autoplan.units import UnitWay

__all__ = ["Pins", "Plan", "UnitWay", "distribute", "plan"]
