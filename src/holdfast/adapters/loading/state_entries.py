"""This rank's values of the entries in state.json, and the tensors they refer to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from holdfast.adapters.live_state import LiveState, Reshards
from holdfast.adapters.loading.wants import LoadRequests
from holdfast.adapters.tree import unflatten
from holdfast.layout.coordinates import axis_sizes, coordinate_on, key_at, label, parse_label
from holdfast.layout.mesh import Mesh
from holdfast.plan.state_references import references

_KINDS = {"module": "module", "averages": "moving average"}


class StateEntries:
    """The entries of state.json, looked up for one rank; mismatches go to the findings of `requests`."""

    def __init__(self, live: LiveState, requests: LoadRequests, mesh: Mesh, rank: int, world: int) -> None:
        self._live = live
        self._requests = requests
        self._mesh = mesh
        self._rank = rank
        self._world = world

    def value(self, name: str) -> tuple[Any, str] | None:
        """Return this rank's value of an entry, and the suffix of its tensors' keys; None without a value."""
        contents, findings = self._requests.contents, self._requests.findings
        entry = contents.state.get(name)
        if entry is None:
            has = ", ".join(sorted({*contents.groups, *contents.state}))
            findings.missing.append(f"{name}: no such entry; the checkpoint has {has or 'nothing'}")
            return None
        kind = entry["kind"]
        if kind == "optimizer":
            findings.mismatched.append(f"{name}: saved as an optimizer, but the live value is not an optimizer")
            return None
        owners: dict[str, Mapping[str, Any]] = {"module": self._live.modules, "averages": self._live.averages}
        if kind in owners and name not in owners[kind]:
            findings.mismatched.append(f"{name}: saved as a {_KINDS[kind]}, but the live value is not a {_KINDS[kind]}")
            return None
        if "value" in entry:
            return entry["value"], ""
        return self._value_at_coordinate(name, entry)

    def _value_at_coordinate(self, name: str, entry: Mapping[str, Any]) -> tuple[Any, str] | None:
        axes, sizes = tuple(entry["axes"]), tuple(entry["sizes"])
        coordinate = coordinate_on(self._mesh, axes, self._rank)
        if coordinate is not None and axis_sizes(self._mesh, axes, self._world) == sizes:
            text = label(axes, coordinate)
            if text in entry["values"]:
                # The tensors of a tree are replicas under one key; those of objects are stored by coordinate.
                return entry["values"][text], "" if entry["kind"] == "tensors" else text
        if not isinstance(self._live.statefuls.get(name), Reshards):
            saved = ", ".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True))
            live = ", ".join(f"{axis}={size}" for axis, size in zip(self._mesh.axes, self._mesh.sizes, strict=True))
            fix = "give the object a holdfast_reshard method"
            if name not in self._live.statefuls:
                fix = "replace it with an object that has state_dict, load_state_dict and holdfast_reshard"
            differs = f"{name}: its value differs along {saved}, but the live mesh is {live}"
            self._requests.findings.mismatched.append(f"{differs}; {fix}, or exclude it with ignore")
        return None

    def new_tensors(
        self, name: str, value: Any, suffix: str, like: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Allocate and request a tensor for every reference in an encoded value.

        Returns None if any of them cannot be filled, so that no uninitialized memory is returned; the
        findings say why.
        """
        out = {}
        complete = True
        for key in references(value):
            stored = key_at(key, suffix)
            source = self._requests.contents.find(name, stored)
            if source is None:
                self._requests.findings.missing.append(f"{name}: {stored}")
                complete = False
                continue
            dtype = getattr(torch, source.logical)
            out[key] = torch.empty_like(like[key]) if key in like else torch.empty(source.logical_shape, dtype=dtype)
            complete = self._requests.request(name, stored, out[key], source) and complete
        return out if complete else None

    def reshard(self, name: str, target: Reshards) -> Any:
        """Return the state that `target` makes for this rank from the states of all saved coordinates."""
        values = self._requests.contents.state[name]["values"]
        states = {parse_label(text): self._read_state(name, value, text) for text, value in values.items()}
        return target.holdfast_reshard(states, self._rank, self._world)

    def _read_state(self, name: str, value: Any, suffix: str) -> Any:
        """Read the state of another coordinate with its tensors, immediately: only resharding needs it."""
        read = self._requests.checkpoint.read
        tensors = {}
        for key in references(value):
            source = self._requests.contents.find(name, key_at(key, suffix))
            tensors[key] = _as_tensor(read(key_at(key, suffix), name), source.logical if source else "")
        return unflatten(value, tensors, name)


def _as_tensor(array: np.ndarray[Any, Any], logical: str) -> torch.Tensor:
    """Convert a stored array to a tensor of its logical dtype, including dtypes that numpy lacks."""
    if array.dtype.kind in "biufc":
        tensor = torch.from_numpy(array)
        return tensor.to(getattr(torch, logical)) if logical and array.dtype.kind == "c" else tensor
    return torch.from_numpy(array.view(f"u{array.dtype.itemsize}")).view(getattr(torch, array.dtype.name))
