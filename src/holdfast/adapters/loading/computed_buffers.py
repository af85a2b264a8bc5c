"""Buffers on the meta device that no checkpoint holds, such as inv_freq of a rotary embedding: computed anew.

Modules have two customs: `reset_parameters()` of the module itself, and `_init_weights(module)` of a model around
it, which transformers calls in from_pretrained. Both are called on a copy of the module that shares nothing with it
except plain attributes: its buffers are in memory and empty, and its parameters stay on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.adapters.loading.meta_tensors import MetaTensors, is_on_meta
from holdfast.adapters.module import clean_key


@dataclass(frozen=True, slots=True)
class MetaModule:
    """A submodule with tensors of its own on the meta device: its path, and the modules around it, nearest first."""

    path: str
    module: nn.Module
    around: Sequence[nn.Module]

    def key(self, name: str) -> str:
        return clean_key(f"{self.path}.{name}" if self.path else name)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's own tensors on the meta device by name: parameters and buffers."""
        for held in (self.module._parameters, self.module._buffers):
            yield from ((name, tensor) for name, tensor in held.items() if tensor is not None and is_on_meta(tensor))


def meta_modules(module: nn.Module) -> Iterator[MetaModule]:
    """Yield the submodules with tensors on the meta device; a shared one once."""
    parts = dict(module.named_modules())
    for path, part in parts.items():
        names = path.split(".") if path else []
        around = [parts[parent] for end in range(len(names) - 1, -1, -1) if (parent := ".".join(names[:end])) in parts]
        found = MetaModule(path, part, around)
        if any(True for _ in found.tensors()):
            yield found


def compute_buffers(owner: MetaModule, names: Sequence[str], made: MetaTensors) -> dict[str, torch.Tensor]:
    """Return the buffers of a module that it can compute anew, by name. Changes nothing of the module."""
    module = owner.module
    calls: list[Callable[[nn.Module], Any]] = []
    if callable(getattr(module, "reset_parameters", None)):
        calls.append(_reset)
    others = (getattr(around, "_init_weights", None) for around in (module, *owner.around))
    calls += [call for call in others if callable(call)]
    for call in calls:
        empty = {name: _empty(module._buffers[name], made) for name in names}
        if None in empty.values():
            return {}
        copy = _detached_copy(module, {name: tensor for name, tensor in empty.items() if tensor is not None})
        versions = {name: copy._buffers[name]._version for name in names}  # type: ignore[union-attr]
        if not _runs(call, copy):
            continue
        found = {name: _computed(copy, name, empty[name], versions[name]) for name in names}
        if any(tensor is not None for tensor in found.values()):
            return {name: _like(module._buffers[name], tensor) for name, tensor in found.items() if tensor is not None}
    return {}


def _reset(module: Any) -> None:
    module.reset_parameters()


def _runs(call: Callable[[nn.Module], Any], copy: nn.Module) -> bool:
    """Call an initialization; one that needs more than the module alone computes nothing."""
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            call(copy)
    except Exception:  # noqa: BLE001  (the program's own code; the buffers are reported as not computed)
        return False
    return True


def _empty(buffer: Any, made: MetaTensors) -> torch.Tensor | None:
    """Return memory for a buffer, with NaN where it can be; None for a sharded buffer."""
    if isinstance(buffer, DTensor):
        if not all(placement.is_replicate() for placement in buffer.placements):
            return None
        device, local = made.device_for(buffer), buffer._local_tensor
    else:
        device, local = made.device_for(buffer), buffer
    empty = torch.empty_like(local, device=device)
    return empty.fill_(float("nan")) if _holds_nan(empty) else empty.zero_()


def _holds_nan(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _detached_copy(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module of the same class with these buffers; its other tensors are on the meta device."""
    copy: nn.Module = object.__new__(type(module))
    vars(copy).update(vars(module))

    def on_meta(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    params = {name: on_meta(param) for name, param in module._parameters.items()}
    vars(copy)["_parameters"] = {
        name: None if param is None else nn.Parameter(param, requires_grad=False) for name, param in params.items()
    }
    vars(copy)["_buffers"] = {name: on_meta(buffer) for name, buffer in module._buffers.items()} | dict(buffers)
    vars(copy)["_modules"] = {}
    return copy


def _computed(copy: nn.Module, name: str, empty: torch.Tensor | None, version: int) -> torch.Tensor | None:
    """Return a buffer that was written or replaced; None if it was left as it was, or in part."""
    found = copy._buffers.get(name, vars(copy).get(name))
    if not isinstance(found, torch.Tensor) or empty is None or found.is_meta:
        return None
    if found is empty and found._version == version:
        return None
    if found.shape != empty.shape or found.dtype != empty.dtype:
        return None
    if _holds_nan(found) and bool(found.isnan().any()):
        return None
    return found.detach().to(empty.device)


def _like(buffer: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a computed buffer as the module holds it: a replicated DTensor where it is one."""
    if not isinstance(buffer, DTensor):
        return local
    return DTensor.from_local(local, buffer.device_mesh, buffer.placements, run_check=False)
