"""Sharding plans of holdfast.spmd in a conversion: kept if the keys of their module stay, dropped with a note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.plan.contents import Contents

Plans = Mapping[str, Any]


def kept_plans(plans: Plans, before: Contents, after: Contents) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plans of modules that the mapping does not change, and a note for every dropped plan.

    `before` and `after` are the contents before and after the mapping.
    """
    kept = {name: plan for name, plan in plans.items() if _is_same(name, before, after)}
    notes = tuple(
        f"the holdfast.spmd plan of {name} is omitted: it names keys that the mapping changes"
        for name in plans
        if name not in kept
    )
    return kept, notes


def plans_for_format(plans: Plans, written: Contents, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plans to write, and a note for every plan that the format cannot store."""
    present = {name: plan for name, plan in plans.items() if name in written.groups}
    if form == "holdfast":
        return present, ()
    return {}, tuple(
        f"the holdfast.spmd plan of {name} is omitted: the format {form} cannot store it" for name in present
    )


def kept_mappings(mappings: Mapping[str, str], before: Contents, after: Contents) -> dict[str, str]:
    """Return the recorded mappings to names in memory, of modules whose stored keys stay as they are."""
    return {
        name: text
        for name, text in mappings.items()
        if name in after.groups and before.groups[name].tensors.keys() == after.groups[name].tensors.keys()
    }


def _is_same(name: str, before: Contents, after: Contents) -> bool:
    if name not in before.groups or name not in after.groups:
        return name not in before.groups  # a module without tensors has no keys that could change
    return before.groups[name].tensors == after.groups[name].tensors
