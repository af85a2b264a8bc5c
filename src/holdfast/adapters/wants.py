"""Wants: where stored tensors go in live memory, and what does not fit. Touches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.adapters.optimizer import StateTensor
from holdfast.adapters.stored import StoredState
from holdfast.adapters.tensors import Holder, holder_of, part_view, raw_array
from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.format.names import masters_group
from holdfast.layout.box import Box
from holdfast.layout.placement import Part
from holdfast.plan.arrays import Destination, RawArray
from holdfast.plan.choice import Choice
from holdfast.plan.contents import Contents, StoredTensor
from holdfast.plan.files import Place
from holdfast.plan.quantized import Quantized, quantized_weights
from holdfast.plan.terms import destinations_of


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
    """The destinations of one rank.

    `contents` is what the checkpoint holds under the keys of the live state; `kept` are the names
    ("group: key") of tensors that are meant to keep the values they have.
    """

    def __init__(
        self,
        checkpoint: StoredState,
        contents: Contents,
        choice: Choice,
        *,
        cast: bool,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self.checkpoint = checkpoint
        self.contents = contents
        self.choice = choice
        self.findings = Findings()
        self.destinations: dict[tuple[Place, Box], list[Destination]] = {}
        self._cast = cast
        self._kept = kept
        self._quantized_of: dict[str, Mapping[str, Quantized]] = {}

    def keeps(self, group: str, key: str) -> bool:
        """Whether a tensor is meant to keep the values it has."""
        return f"{group}: {key}" in self._kept

    def want(self, group: str, key: str, value: StateTensor, found: StoredTensor | None = None) -> bool:
        """Add a destination; False, with a finding, if the tensor is missing or does not fit."""
        text = f"{group}: {key}"
        if self.keeps(group, key):
            return False
        found = found or self.contents.find(group, key)
        if found is None:
            self.findings.missing.append(text)
            return False
        self.findings.wanted.append(f"{group}: {found.key}")
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            raise Unsupported(f"{text}: a load cannot fill a conjugate or negative view; resolve it first")
        holder = holder_of(value, text)
        if not self._fits(found, holder, text):
            return False
        self.findings.loaded.append(f"{group}: {found.key}")
        for part in holder.parts:
            if part.box.volume:
                inner = TensorDestination(holder, part, found.dtype.name)
                for wanted, destination in destinations_of(found.recipe, part.box, inner):
                    self.destinations.setdefault(wanted, []).append(destination)
        return True

    def _fits(self, found: StoredTensor, holder: Holder, text: str) -> bool:
        stored, live = found.logical, holder.logical.name
        if holder.shape != found.shape:
            shapes = f"stored {list(found.shape)}, live {list(holder.shape)}"
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
        problem = self._cast_problem(found, live)
        if problem is not None:
            self.findings.mismatched.append(f"{text}: {problem}")
            return False
        self.findings.cast.append(f"{text}: {stored} to {live}")
        return True

    def _cast_problem(self, found: StoredTensor, live: str) -> str | None:
        """Return why a cast that was asked for would give other numbers than the weight's; None if it would not."""
        stored = found.logical
        if stored == "uint16" and "float" in live:
            return (
                f"stored as uint16, live {live}: a cast would take raw bits for numbers; if they are "
                "those of bfloat16, convert the checkpoint first: holdfast convert SRC DST --uint16 bfloat16"
            )
        weight = self._quantized(found.group).get(found.key)
        if weight is None:
            return None
        return (
            f"{weight.what}; a cast to {live} without its scales would be wrong: load weights that are not quantized "
            "(from_pretrained with dequantize, or the tool that quantized them)"
        )

    def _quantized(self, group: str) -> Mapping[str, Quantized]:
        """Return the quantized weights of a group, looked for once."""
        if group not in self._quantized_of:
            members = self.contents.groups[group]
            dtypes = {key: members.logical.get(key, recipe.dtype.name) for key, recipe in members.tensors.items()}
            self._quantized_of[group] = quantized_weights(dtypes)
        return self._quantized_of[group]

    def want_parameter(self, module: str, key: str, stored_key: str, tensor: torch.Tensor) -> None:
        """A module's tensor, from the masters when only they are as wide as the live tensor."""
        found = self.contents.find(module, stored_key) or self.contents.find(module, key)
        master = self.contents.find(masters_group(module), stored_key)
        live = str(tensor.dtype).removeprefix("torch.")
        if found is not None and master is not None and live == master.dtype.name != found.dtype.name:
            self.findings.wanted.append(f"{module}: {found.key}")
            self.want(masters_group(module), stored_key, tensor, master)
        else:
            self.want(module, key, tensor, found)

    def want_master(self, module: str, key: str, value: StateTensor) -> bool:
        """A master from its own group, or from a model that was stored as wide as it is."""
        group = masters_group(module)
        if not self.choice.takes(group, key):
            return False
        return self.want(group if self.contents.find(group, key) is not None else module, key, value)
