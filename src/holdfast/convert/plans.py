"""Plans of holdfast.spmd in a conversion: a plan names the keys of its module, and is kept while they are the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.plan.contents import Contents

Plans = Mapping[str, Any]


def kept_plans(plans: Plans, before: Contents, after: Contents) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plans whose modules no mapping has changed, and a note for every plan that is dropped.

    `before` and `after` are the contents around the mapping.
    """
    kept = {name: plan for name, plan in plans.items() if _is_same(name, before, after)}
    notes = tuple(
        f"the holdfast.spmd plan of {name} is left out: it names keys that the mapping changes"
        for name in plans
        if name not in kept
    )
    return kept, notes


def plans_without_place(plans: Plans, written: Contents, form: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the plans of the modules that are written, and a note where the format has no place for them."""
    present = {name: plan for name, plan in plans.items() if name in written.groups}
    if form == "holdfast":
        return present, ()
    return {}, tuple(
        f"the holdfast.spmd plan of {name} is left out: the format {form} has no place for it" for name in present
    )


def _is_same(name: str, before: Contents, after: Contents) -> bool:
    if name not in before.groups or name not in after.groups:
        return name not in before.groups  # a module without tensors has no keys that could change
    return before.groups[name].tensors == after.groups[name].tensors
