"""Wants: where stored tensors go in live memory, and what does not fit. Touches nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.adapters.entries import masters_group
from holdfast.adapters.optimizer import StateTensor
from holdfast.adapters.stored import StoredState
from holdfast.adapters.tensors import Holder, holder_of, part_view, raw_array
from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.layout.placement import Part
from holdfast.plan.arrays import RawArray
from holdfast.plan.choice import Choice
from holdfast.plan.files import Place


@dataclass(slots=True)
class Findings:
    """What was looked for on this rank and what does not fit; texts, so that ranks can gather them."""

    wanted: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cast: list[str] = field(default_factory=list)


class TensorDestination:
    """A part of a live tensor that a load fills."""

    def __init__(self, holder: Holder, part: Part, stored: str) -> None:
        self._view = part_view(holder, part)
        self._stored: torch.dtype = getattr(torch, stored)

    def direct(self) -> RawArray | None:
        if self._view.device.type != "cpu" or self._view.dtype != self._stored:
            return None
        return raw_array(self._view)

    def put(self, part: Box, data: RawArray) -> None:
        index = part.within(Box.full(tuple(self._view.shape)))
        array = self.direct()
        if array is not None:
            array[index] = data
        elif data.size:
            values = torch.from_numpy(np.array(data).reshape(-1).view("u1"))
            self._view[index].copy_(values.view(self._stored).reshape(part.sizes))


class Wants:
    """The destinations of one rank."""

    def __init__(self, checkpoint: StoredState, choice: Choice, *, cast: bool) -> None:
        self.checkpoint = checkpoint
        self.choice = choice
        self.findings = Findings()
        self.destinations: dict[tuple[Place, Box], list[TensorDestination]] = {}
        self._cast = cast

    def place(self, group: str, key: str) -> Place | None:
        """Where a key is stored, also under the key it is tied to."""
        record = self.checkpoint.manifest.groups.get(group)
        if record is None:
            return None
        return self.checkpoint.places[group].get(record.aliases.get(key, key))

    def want(self, group: str, key: str, value: StateTensor, place: Place | None = None) -> bool:
        """Add a destination; False, with a finding, if the tensor is missing or does not fit."""
        place = place or self.place(group, key)
        text = f"{group}: {key}"
        if place is None:
            self.findings.missing.append(text)
            return False
        self.findings.wanted.append(f"{group}: {place.spec.key}")
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            raise Unsupported(f"{text}: a load cannot fill a conjugate or negative view; resolve it first")
        holder = holder_of(value, text)
        if not self._fits(group, place, holder, text):
            return False
        self.findings.loaded.append(f"{group}: {place.spec.key}")
        for part in holder.parts:
            if part.box.volume:
                found = self.destinations.setdefault((place, part.box), [])
                found.append(TensorDestination(holder, part, place.spec.dtype.name))
        return True

    def _fits(self, group: str, place: Place, holder: Holder, text: str) -> bool:
        stored, live = self.checkpoint.logical_dtype(group, place), holder.logical.name
        if holder.shape != place.spec.shape:
            shapes = f"stored {list(place.spec.shape)}, live {list(holder.shape)}"
            self.findings.mismatched.append(f"{text}: the shape differs: {shapes}")
            return False
        if stored == live:
            return True
        castable = all(dtype_named(name).stored == name for name in (stored, live))
        castable = castable and ("complex" in stored) == ("complex" in live)
        if not self._cast or not castable:
            hint = "; pass cast=True to convert" if castable else ""
            self.findings.mismatched.append(f"{text}: the dtype differs: stored {stored}, live {live}{hint}")
            return False
        self.findings.cast.append(f"{text}: {stored} to {live}")
        return True

    def want_parameter(self, module: str, key: str, stored_key: str, tensor: torch.Tensor) -> None:
        """A module's tensor, from the masters when only they are as wide as the live tensor."""
        place = self.place(module, stored_key) or self.place(module, key)
        master = self.place(masters_group(module), stored_key)
        live = str(tensor.dtype).removeprefix("torch.")
        if place is not None and master is not None and live == master.spec.dtype.name != place.spec.dtype.name:
            self.findings.wanted.append(f"{module}: {place.spec.key}")
            self.want(masters_group(module), stored_key, tensor, master)
        else:
            self.want(module, key, tensor, place)

    def want_master(self, module: str, key: str, value: StateTensor) -> bool:
        """A master from its own group, or from a model that was stored as wide as it is."""
        group = masters_group(module)
        if not self.choice.takes(group, key):
            return False
        return self.want(group if self.place(group, key) is not None else module, key, value)
