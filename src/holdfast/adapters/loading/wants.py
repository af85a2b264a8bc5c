"""Wants: where stored tensors go in live memory, and what does not fit. Touches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from holdfast.adapters.optimizer import StateTensor
from holdfast.adapters.overlap import address_range, tensor_overlaps
from holdfast.adapters.tensors import RAW_DTYPES, Holder, holder_of, part_view, raw_array
from holdfast.core.errors import LayoutError, Mismatch, Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.format.names import masters_group
from holdfast.layout.box import Box
from holdfast.layout.placement import ShardBox
from holdfast.plan.arrays import RawArray, ShardDestination
from holdfast.plan.contents import Contents, StoredTensor
from holdfast.plan.files import Place
from holdfast.plan.key_patterns import KeySelection
from holdfast.plan.quantized import Quantized, quantized_weights
from holdfast.plan.recipe_fill import destinations_of


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

    def __init__(self, holder: Holder, part: ShardBox, stored: str) -> None:
        self._live = self._view = part_view(holder, part)
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

    def set_aside(self) -> None:
        """Fill memory of its own instead of the live tensor, until `hand_over`."""
        self._view = torch.empty_like(self._live, memory_format=torch.contiguous_format)

    def hand_over(self) -> None:
        self._live.copy_(self._view)

    def holds(self) -> bool:
        """Whether the live tensor has the bits that were loaded for it."""
        width = RAW_DTYPES[self._live.element_size()]
        return torch.equal(self._live.view(width), self._view.view(width))


@dataclass(frozen=True, slots=True)
class _Filled:
    """A live tensor that a load fills: its name in messages, the stored tensor, its memory."""

    text: str
    stored: str
    local: torch.Tensor
    destinations: list[TensorDestination]


class Wants:
    """The destinations of one rank.

    `contents` is what the checkpoint holds under the keys of the live state; `kept` are the names
    ("group: key") of tensors that are meant to keep the values they have.
    """

    def __init__(
        self,
        checkpoint: StoredState,
        contents: Contents,
        choice: KeySelection,
        *,
        cast: bool,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self.checkpoint = checkpoint
        self.contents = contents
        self.choice = choice
        self.findings = Findings()
        self.destinations: dict[tuple[Place, Box], list[ShardDestination]] = {}
        self._cast = cast
        self._kept = kept
        self._filled: list[_Filled] = []
        self._shared: list[list[_Filled]] = []
        self._quantized_of: dict[str, Mapping[str, Quantized]] = {}

    @property
    def casts(self) -> bool:
        """Whether dtypes may be converted."""
        return self._cast

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
        if tensor_overlaps(holder.local):
            local = holder.local
            raise LayoutError(
                f"{text}: several elements of the live tensor share memory (strides {list(local.stride())} for the "
                f"shape {list(local.shape)}), so that it cannot hold what was saved; clone it before the load: "
                "tensor.contiguous(), or leave it out with ignore"
            )
        self.findings.loaded.append(f"{group}: {found.key}")
        filled = _Filled(text, f"{found.group}: {found.key}", holder.local, [])
        for part in holder.parts:
            if part.box.volume:
                inner = TensorDestination(holder, part, found.dtype.name)
                filled.destinations.append(inner)
                for wanted, destination in destinations_of(found.recipe, part.box, inner):
                    self.destinations.setdefault(wanted, []).append(destination)
        self._filled.append(filled)
        return True

    def set_shared_aside(self) -> bool:
        """Find live tensors that share memory and take different stored tensors; whether there are any.

        Each of them is loaded into memory of its own: only the values tell whether one memory can hold both.
        """
        # Addresses of different devices do not meet; if they did, tensors would only be compared in vain.
        ranges = [(*address_range(filled.local), number) for number, filled in enumerate(self._filled)]
        members: list[_Filled] = []
        reach = 0
        for begin, end, number in sorted(ranges):
            if begin >= reach:
                members = []
            members.append(self._filled[number])
            if len(members) == 2:
                self._shared.append(members)
            reach = max(end, reach)
        self._shared = [members for members in self._shared if len({filled.stored for filled in members}) > 1]
        for filled in (filled for members in self._shared for filled in members):
            for destination in filled.destinations:
                destination.set_aside()
        return bool(self._shared)

    def settle_shared(self) -> None:
        """Hand over what was set aside; raises Mismatch if one memory would have to hold different values."""
        for members in self._shared:
            for filled in members:
                for destination in filled.destinations:
                    destination.hand_over()
            lost = [filled.text for filled in members if not all(d.holds() for d in filled.destinations)]
            if lost:
                others = ", ".join(filled.text for filled in members if filled.text not in lost)
                raise Mismatch(
                    f"{', '.join(lost)} and {others} share memory in the live state, and the checkpoint holds "
                    "different values for them: the last one was loaded; give each a tensor of its own, or leave "
                    "one out with ignore"
                )

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
        if not self.choice.selects(group, key):
            return False
        return self.want(group if self.contents.find(group, key) is not None else module, key, value)


class StoredState(Protocol):
    """A checkpoint's tensors and values; `holdfast.open` gives one."""

    @property
    def path(self) -> str: ...

    @property
    def contents(self) -> Contents: ...

    def read(self, key: str, group: str | None = None, *, verify: bool = True) -> npt.NDArray[Any]: ...
