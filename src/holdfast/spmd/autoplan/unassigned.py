"""Parameters outside of all planned branches, or shared with them: those that stay whole, and placements to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from holdfast.spmd.autoplan.partition import PlannedBranch
from holdfast.spmd.autoplan.recording import Recording, Step, is_under
from holdfast.spmd.autoplan.units import WHOLE
from holdfast.spmd.autoplan.whole_model import parameter_role


def unassigned_roles(recording: Recording, parts: Sequence[PlannedBranch], roles: Mapping[str, str]) -> dict[str, int]:
    """Return the roles of the parameters that no branch has, and their bytes: they stay whole."""
    names = [name for part in parts for name in part.names]
    held = _roles_in([step for step in recording.steps if _is_within(step, names)], recording, roles)
    sizes: dict[str, int] = {}
    for value in recording.values:
        if value.key is not None and (role := parameter_role(value.key, roles)) not in held:
            sizes[role] = sizes.get(role, 0) + value.bytes
    return sizes


def with_shared_placements(
    recording: Recording, parts: Sequence[PlannedBranch], roles: Mapping[str, str]
) -> Iterator[list[PlannedBranch]]:
    """Yield the branches for each placement of the parameters that are also used outside of them; whole is last."""
    names = [name for part in parts for name in part.names]
    shared = _roles_in([step for step in recording.steps if not _is_within(step, names)], recording, roles)
    keys = [[key for key in _keys(part) if parameter_role(key, roles) in shared] for part in parts]
    placements = {
        option.places(key) for part, own in zip(parts, keys, strict=True) for key in own for option in part.options
    }
    for placement in sorted(placements, key=lambda places: (sum(place == WHOLE for place in places), places)):
        branches = []
        for part, own in zip(parts, keys, strict=True):
            options = tuple(option for option in part.options if all(option.places(key) == placement for key in own))
            branches.append(replace(part, options=options))
        if all(part.options for part in branches):
            yield branches


def _keys(part: PlannedBranch) -> list[str]:
    return list(part.options[0].walks[0].parameters)


def _is_within(step: Step, names: Sequence[str]) -> bool:
    return any(is_under(step.module, name) for name in names)


def _roles_in(steps: Sequence[Step], recording: Recording, roles: Mapping[str, str]) -> set[str]:
    keys = {recording.values[number].key for step in steps for number in step.inputs}
    return {parameter_role(key, roles) for key in keys if key is not None}
