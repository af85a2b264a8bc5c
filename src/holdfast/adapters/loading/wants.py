"""Load requests for single tensors: shape and cast checks, master weights, staging of shared memory, findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from holdfast.adapters.live_types import compare_types
from holdfast.adapters.loading.device_staging import FlatTensor
from holdfast.adapters.loading.findings import Findings
from holdfast.adapters.loading.meta_tensors import MetaTensors, is_on_meta
from holdfast.adapters.loading.subclass_requests import request_subclass
from holdfast.adapters.optimizer import StateTensor
from holdfast.adapters.subclass_tensors import is_subclass
from holdfast.adapters.tensors import (
    RAW_DTYPES,
    Holder,
    address_range,
    holder_of,
    part_view,
    raw_array,
    tensor_overlaps,
)
from holdfast.core.errors import LayoutError, Mismatch, Unsupported
from holdfast.core.names import masters_group
from holdfast.format.dtypes import dtype_named
from holdfast.layout.box import Box
from holdfast.layout.placement import ShardBox
from holdfast.plan.contents import Contents, KeySelection, StoredTensor
from holdfast.plan.files import FlatArray, FlatDestination, Place, RawArray, ShardDestination
from holdfast.plan.quantized_keys import Quantized, quantized_weights
from holdfast.plan.recipe import destinations_of
from holdfast.plan.subclass_keys import StoredSubclasses


def stored_key(contents: Contents, group: str, key: str) -> str:
    """Return the key under which a group stores a tensor with this key or alias."""
    members = contents.groups.get(group)
    return key if members is None else members.aliases.get(key, key)


class TensorDestination:
    """A part of a live tensor that a load fills."""

    def __init__(self, holder: Holder, part: ShardBox, stored: str, device: torch.device | None = None) -> None:
        self._live = self._view = part_view(holder, part)
        self._stored: torch.dtype = getattr(torch, stored)
        self._device = device  # copies to this device need not be waited for

    def flat(self) -> FlatDestination | None:
        if self._view.device == self._device and self._view.is_contiguous():
            return FlatTensor(self._view, self._stored)
        return FlatArray.of(self.direct())

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

    def stage(self) -> None:
        """Fill a temporary tensor instead of the live tensor, until `copy_to_live`."""
        self._view = torch.empty_like(self._live, memory_format=torch.contiguous_format)

    def copy_to_live(self) -> None:
        self._live.copy_(self._view)

    def matches_live(self) -> bool:
        """Return True if the live tensor has exactly the loaded bits."""
        width = RAW_DTYPES[self._live.element_size()]
        return torch.equal(self._live.view(width), self._view.view(width))


@dataclass(frozen=True, slots=True)
class _RequestedTensor:
    """A live tensor that a load fills: its name in messages, the stored tensor, its memory."""

    text: str
    stored: str
    local: torch.Tensor
    destinations: list[TensorDestination]


class LoadRequests:
    """The tensors that one rank loads, and their destinations.

    `contents` are the checkpoint's contents under the keys of the live state; `kept` are the names
    ("group: key") of tensors that keep their live values.
    """

    def __init__(
        self,
        checkpoint: StoredState,
        contents: Contents,
        choice: KeySelection,
        *,
        cast: bool,
        kept: frozenset[str] = frozenset(),
        meta: MetaTensors | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.contents = contents
        self.choice = choice
        self.findings = Findings()
        self.destinations: dict[tuple[Place, Box], list[ShardDestination]] = {}
        self.devices: dict[torch.device, None] = {}  # of requested tensors, in order
        self.meta = meta or MetaTensors(None)
        self._cast = cast
        self._kept = kept
        self._filled: list[_RequestedTensor] = []
        self._shared: list[list[_RequestedTensor]] = []
        self._subclasses_of: dict[str, StoredSubclasses] = {}
        self._quantized_of: dict[str, Mapping[str, Quantized]] = {}

    @property
    def _first_cuda(self) -> torch.device | None:
        return next((device for device in self.devices if device.type == "cuda"), None)

    @property
    def casts(self) -> bool:
        """True if dtypes may be converted."""
        return self._cast

    def subclasses(self, group: str) -> StoredSubclasses:
        """Return the tensor subclasses that a group was saved from, cached."""
        if group not in self._subclasses_of:
            self._subclasses_of[group] = StoredSubclasses.of(self.contents, group)
        return self._subclasses_of[group]

    def keeps(self, group: str, key: str) -> bool:
        """Return True if a tensor keeps its live values."""
        return f"{group}: {key}" in self._kept

    def request(self, group: str, key: str, value: StateTensor, source: StoredTensor | None = None) -> bool:
        """Add a destination; returns False and records a finding if the tensor is missing or mismatched.

        For a tensor on the meta device it is the tensor that takes its place.
        """
        text = f"{group}: {key}"
        if self.keeps(group, key):
            if is_on_meta(value):
                self.findings.mismatched.append(
                    f"{text}: the mapping keeps its live value, but it is on the meta device"
                )
            return False
        stored = self.subclasses(group)
        kept = stored_key(self.contents, group, key)
        if kept in stored.descriptions or is_subclass(value):
            return request_subclass(self, group, kept, value, stored)
        source = source or self.contents.find(group, key)
        if source is None:
            self.findings.missing.append(text)
            return False
        self.findings.wanted.append(f"{group}: {source.key}")
        if isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg()):
            raise Unsupported(f"{text}: a load cannot fill a conjugate or negative view; resolve it first")
        return self.request_holder(group, key, holder_of(value, text, allow_meta=True), source, text, value)

    def request_holder(
        self,
        group: str,
        key: str,
        holder: Holder,
        source: StoredTensor,
        text: str,
        value: StateTensor | None = None,
    ) -> bool:
        """Add a destination for a stored tensor; returns False and records a finding if it does not fit.

        `value` is the live tensor, where it may be on the meta device.
        """
        if not self._fits(source, holder, text):
            return False
        if tensor_overlaps(holder.local):
            local = holder.local
            raise LayoutError(
                f"{text}: several elements of the live tensor share memory (strides {list(local.stride())} for "
                f"shape {list(local.shape)}), so it cannot hold the saved values; clone it before the load "
                "(tensor.contiguous()), or exclude it with ignore"
            )
        in_memory = None if value is None else self.meta.in_memory(value, text)
        if in_memory is not None and in_memory is not value:
            holder = holder_of(in_memory, text)
        self.findings.loaded.append(f"{group}: {source.key}")
        self.devices.setdefault(holder.local.device)
        filled = _RequestedTensor(text, f"{source.group}: {source.key}", holder.local, [])
        for part in holder.parts:
            if part.box.volume:
                inner = TensorDestination(holder, part, source.dtype.name, self._first_cuda)
                filled.destinations.append(inner)
                for wanted, destination in destinations_of(source.recipe, part.box, inner):
                    self.destinations.setdefault(wanted, []).append(destination)
        self._filled.append(filled)
        return True

    def stage_shared(self) -> bool:
        """Stage live tensors that share memory but load different stored tensors; returns True if there are any.

        Each of them is loaded into a temporary tensor: the shared memory can hold both only if the values are equal.
        """
        # Addresses of different devices do not overlap; if they did, the cost would be needless comparisons.
        ranges = [(*address_range(filled.local), number) for number, filled in enumerate(self._filled)]
        members: list[_RequestedTensor] = []
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
                destination.stage()
        return bool(self._shared)

    def copy_shared(self) -> None:
        """Copy staged tensors to the live ones; raises Mismatch if shared memory would need different values."""
        for members in self._shared:
            for filled in members:
                for destination in filled.destinations:
                    destination.copy_to_live()
            lost = [filled.text for filled in members if not all(d.matches_live() for d in filled.destinations)]
            if lost:
                others = ", ".join(filled.text for filled in members if filled.text not in lost)
                raise Mismatch(
                    f"{', '.join(lost)} and {others} share memory in the live state, but the checkpoint holds "
                    "different values for them; the last one was loaded. Give each its own tensor, or exclude "
                    "one with ignore"
                )

    def _fits(self, source: StoredTensor, holder: Holder, text: str) -> bool:
        stored, live = source.logical, holder.logical.name
        if holder.shape != source.shape:
            shapes = f"stored {list(source.shape)}, live {list(holder.shape)}"
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
        problem = self._cast_problem(source, live)
        if problem is not None:
            self.findings.mismatched.append(f"{text}: {problem}")
            return False
        self.findings.cast.append(f"{text}: {stored} to {live}")
        return True

    def _cast_problem(self, source: StoredTensor, live: str) -> str | None:
        """Return why a cast would not preserve the weight's values; None if it would."""
        stored = source.logical
        if stored == "uint16" and "float" in live:
            return (
                f"stored as uint16, live {live}: a cast would interpret raw bits as numbers; if they are "
                "bfloat16 bits, convert the checkpoint first: holdfast convert SRC DST --uint16 bfloat16"
            )
        weight = self._quantized(source.group).get(source.key)
        if weight is None:
            return None
        return (
            f"{weight.what}; a cast to {live} would ignore its scales; dequantize the weights before loading them "
            "(from_pretrained with dequantize, or the tool that quantized them)"
        )

    def _quantized(self, group: str) -> Mapping[str, Quantized]:
        """Return the quantized weights of a group, cached."""
        if group not in self._quantized_of:
            members = self.contents.groups[group]
            dtypes = {key: members.logical.get(key, recipe.dtype.name) for key, recipe in members.tensors.items()}
            self._quantized_of[group] = quantized_weights(dtypes)
        return self._quantized_of[group]

    def compare_types(self, saved: Any, live: Any, path: str) -> list[str]:
        """Report classes of the live state that do not fit a decoded value; return notes on those that it lacks."""
        compared = list(compare_types(saved, live, path))
        self.findings.mismatched += [finding.text for finding in compared if finding.mismatched]
        return [finding.text for finding in compared if not finding.mismatched]

    def request_parameter(self, module: str, key: str, stored_key: str, tensor: torch.Tensor) -> None:
        """Request a module's tensor, from the master weights if only they have the live tensor's dtype."""
        source = self.contents.find(module, stored_key) or self.contents.find(module, key)
        master = self.contents.find(masters_group(module), stored_key)
        live = str(tensor.dtype).removeprefix("torch.")
        if source is not None and master is not None and live == master.dtype.name != source.dtype.name:
            self.findings.wanted.append(f"{module}: {source.key}")
            self.request(masters_group(module), stored_key, tensor, master)
        else:
            self.request(module, key, tensor, source)

    def request_master(self, module: str, key: str, value: StateTensor) -> bool:
        """Request a master weight from its group, or from the model if the checkpoint has no master for it."""
        group = masters_group(module)
        if not self.choice.selects_master(module, key):
            return False
        return self.request(group if self.contents.find(group, key) is not None else module, key, value)


class StoredState(Protocol):
    """A checkpoint's tensors and values, as returned by `holdfast.open`."""

    @property
    def path(self) -> str: ...

    @property
    def contents(self) -> Contents: ...

    def read(self, key: str, group: str | None = None, *, verify: bool = True) -> npt.NDArray[Any]: ...
