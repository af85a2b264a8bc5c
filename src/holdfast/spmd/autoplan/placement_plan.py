"""`Plan`, a value: placements and pins by role; printed, compared, saved as JSON, loaded, checked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from holdfast.spmd.autoplan.units import WHOLE
from holdfast.spmd.base.spmd_errors import PlanNotFound, SpmdArgumentError

VERSION = 1
MANIFEST = "holdfast.json"  # the manifest of a checkpoint, which has its model's plan
MOST_BYTES = 64 * 2**20  # a plan has a line for each role
_PLACE = re.compile(r"R|S(\d{1,2})")

Places = tuple[int, ...]  # for each axis of the mesh: a dim, or WHOLE


@dataclass(frozen=True, slots=True)
class Pins:
    """The placements of a module's first input and first result; None to leave them unchanged."""

    takes: Places | None
    gives: Places | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of parameters and activations by role, what a rank moves and holds with them, and why."""

    mesh: tuple[tuple[str, int], ...]  # axes and their sizes
    parameters: tuple[tuple[str, Places], ...]
    activations: tuple[tuple[str, Pins], ...]
    moved_bytes: int  # received by each rank in one forward and backward of the example, at the pins
    held_bytes: int  # parameters and gradients of each rank
    kept_bytes: int  # results that each rank may need for backward
    why: tuple[str, ...]

    def placements(self, role: str) -> list[Placement]:
        """Return a parameter's placements; replicated if the plan does not name it."""
        return placements_of(dict(self.parameters).get(role, (WHOLE,) * len(self.mesh)))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        return {
            "version": VERSION,
            "mesh": [[name, size] for name, size in self.mesh],
            "parameters": {role: _placement_words(places) for role, places in self.parameters},
            "activations": {
                role: {"takes": _placement_words(pins.takes), "gives": _placement_words(pins.gives)}
                for role, pins in self.activations
            },
            "moved_bytes": self.moved_bytes,
            "held_bytes": self.held_bytes,
            "kept_bytes": self.kept_bytes,
            "why": list(self.why),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_dict` wrote; raises SpmdArgumentError for an invalid plan."""
        if not isinstance(value, Mapping) or value.get("version") != VERSION:
            version = value.get("version") if isinstance(value, Mapping) else type(value).__name__
            raise SpmdArgumentError(
                f"invalid plan: expected version {VERSION}, as plan() or Plan.load(path) returns it, "
                f"found {str(version)[:40]!r}"
            )
        expected = {"version", "mesh", "parameters", "activations", "moved_bytes", "held_bytes", "kept_bytes", "why"}
        if value.keys() != expected:
            raise SpmdArgumentError(f"invalid plan: missing or unknown fields {sorted(value.keys() ^ expected)}")
        mesh = _mesh(value["mesh"])
        parameters = _mapping(value["parameters"], "parameters")
        activations = _mapping(value["activations"], "activations")
        why = value["why"]
        if not isinstance(why, list) or not all(isinstance(line, str) for line in why):
            raise SpmdArgumentError("invalid plan: why is not a list of texts")
        return cls(
            mesh,
            tuple((role, _required(words, len(mesh), role)) for role, words in parameters.items()),
            tuple((role, _pins(words, len(mesh), role)) for role, words in activations.items()),
            moved_bytes=_count(value["moved_bytes"], "moved_bytes"),
            held_bytes=_count(value["held_bytes"], "held_bytes"),
            kept_bytes=_count(value["kept_bytes"], "kept_bytes"),
            why=tuple(why),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Load a plan from a file that `save` wrote, or from a checkpoint's manifest.

        Raises PlanNotFound if there is no plan, SpmdArgumentError for an invalid one.
        """
        path = Path(path)
        is_checkpoint = path.is_dir() or path.name == MANIFEST
        file = path / MANIFEST if path.is_dir() else path
        if not file.is_file():
            raise PlanNotFound(f"{path}: no plan found: give a file that Plan.save wrote, or a checkpoint's folder")
        if not is_checkpoint and file.stat().st_size > MOST_BYTES:
            raise SpmdArgumentError(f"{file}: invalid plan: {file.stat().st_size} bytes, more than {MOST_BYTES}")
        try:
            fields = json.loads(file.read_bytes(), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise SpmdArgumentError(f"{file}: invalid plan: {error}") from None
        if is_checkpoint:
            plans = fields.get("plans", {}) if isinstance(fields, dict) else {}
            if "model" not in plans:
                raise PlanNotFound(f"{file}: the model in this checkpoint was not placed by a plan")
            fields = plans["model"]
        return cls.from_dict(fields)

    def __str__(self) -> str:
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh)
        lines = [f"plan for {axes}", f"  moved {_size(self.moved_bytes)} per rank, forward and backward"]
        lines.append(f"  held {_size(self.held_bytes)} of parameters and gradients, kept {_size(self.kept_bytes)}")
        width = max((len(role) for role, _ in (*self.parameters, *self.activations)), default=0)
        lines += [f"  {role:{width}}  {' '.join(_placement_words(places) or ())}" for role, places in self.parameters]
        lines.append("activations")
        for role, pins in self.activations:
            shown = [" ".join(_placement_words(places) or ["as it comes"]) for places in (pins.takes, pins.gives)]
            lines.append(f"  {role:{width}}  {shown[0]} -> {shown[1]}")
        return "\n".join([*lines, "why", *(f"  {line}" for line in self.why)])


def check_model_and_mesh(call: str, model: object, mesh: object) -> None:
    """Raise SpmdArgumentError unless `call` was given a module and a mesh."""
    if not isinstance(model, nn.Module):
        raise SpmdArgumentError(f"{call}: the model is {type(model).__name__}, not an nn.Module")
    if not isinstance(mesh, DeviceMesh):
        raise SpmdArgumentError(
            f"{call}: the mesh is {type(mesh).__name__}, not a DeviceMesh: give init_device_mesh(...), on every rank"
        )


def placements_of(places: Places) -> list[Placement]:
    """Return the placements as torch's types."""
    return [Replicate() if place == WHOLE else Shard(place) for place in places]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count} bytes"


def _placement_words(places: Places | None) -> list[str] | None:
    return None if places is None else ["R" if place == WHOLE else f"S{place}" for place in places]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _mesh(value: Any) -> tuple[tuple[str, int], ...]:
    def is_axis(axis: Any) -> bool:
        return isinstance(axis, list) and len(axis) == 2 and isinstance(axis[0], str) and type(axis[1]) is int

    if not isinstance(value, list) or not value or not all(is_axis(axis) and axis[1] > 0 for axis in value):
        raise SpmdArgumentError(f"invalid plan: mesh is not a list of axes and sizes: {str(value)[:80]}")
    return tuple((name, size) for name, size in value)


def _mapping(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SpmdArgumentError(f"invalid plan: {name} do not map roles to placements: {str(value)[:80]}")
    return value


def _pins(value: Any, axes: int, role: str) -> Pins:
    if not isinstance(value, dict) or value.keys() != {"takes", "gives"}:
        raise SpmdArgumentError(
            f"invalid plan: the activations of {role} need the fields takes and gives: {str(value)[:80]}"
        )
    return Pins(_places(value["takes"], axes, role), _places(value["gives"], axes, role))


def _required(value: Any, axes: int, role: str) -> Places:
    places = _places(value, axes, role)
    if places is None:
        raise SpmdArgumentError(f"invalid plan: {role} has no placements")
    return places


def _places(value: Sequence[Any] | None, axes: int, role: str) -> Places | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != axes:
        raise SpmdArgumentError(
            f"invalid plan: {role} needs {axes} placements, one for each axis, not {str(value)[:80]}"
        )
    places = []
    for word in value:
        match = _PLACE.fullmatch(word) if isinstance(word, str) else None
        if match is None:
            raise SpmdArgumentError(f"invalid plan: {role} is placed {str(word)[:40]!r}; placements are R, S0, S1, ...")
        places.append(WHOLE if word == "R" else int(match[1]))
    return tuple(places)


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:
        raise SpmdArgumentError(f"invalid plan: {name} is {str(value)[:40]!r}, not a number of bytes")
    return value
