"""Sharding rules that DTensor lacks or gets wrong (`enable`), and sharding plans of a model (`plan`)."""

from holdfast.spmd.autoplan import Pins, Plan, UnitWay, distribute, plan
from holdfast.spmd.base.spmd_errors import (
    PlanMismatch,
    PlanNotFound,
    SpmdArgumentError,
    SpmdError,
    SpmdWarning,
    UnsupportedCall,
)
from holdfast.spmd.enable import disable, enable
from holdfast.spmd.redistribute_cost import Move, redistribute_cost
from holdfast.spmd.report import Line, report

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
