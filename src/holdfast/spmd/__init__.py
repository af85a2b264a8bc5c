"""The sharding rules that DTensor lacks or gets wrong: `holdfast.spmd.enable()`."""

from holdfast.spmd.auto import Pins, Plan, UnitWay, distribute, plan
from holdfast.spmd.cost import Move, redistribute_cost
from holdfast.spmd.errors import PlanMismatch, PlanNotFound, SpmdArgumentError, SpmdError, SpmdWarning, UnsupportedCall
from holdfast.spmd.reporting import Line, report
from holdfast.spmd.switch import disable, enable

__all__ = [
    "Line",
    "Move",
    "Pins",
    "Plan",
    "PlanMismatch",
    "PlanNotFound",
    "SpmdArgumentError",
    "SpmdError",
    "SpmdWarning",
    "UnitWay",
    "UnsupportedCall",
    "disable",
    "distribute",
    "enable",
    "plan",
    "redistribute_cost",
    "report",
]
