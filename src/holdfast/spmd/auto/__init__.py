"""Placements for a model's parameters and activations: proposed, printed, applied, written and read."""

from holdfast.spmd.auto.apply import distribute
from holdfast.spmd.auto.placing import UnitWay
from holdfast.spmd.auto.proposal import plan
from holdfast.spmd.auto.values import Pins, Plan

__all__ = ["Pins", "Plan", "UnitWay", "distribute", "plan"]
