"""Tensors on the meta device: each is loaded into a tensor in memory, which takes its place once all is read.

Until then the live state stays on the meta device. The tensors are swapped in place, so that they remain the
same objects: optimizers, ties between weights and FSDP2 keep referring to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from holdfast.adapters.module import memory_identity
from holdfast.adapters.optimizer import StateTensor
from holdfast.adapters.tensors import LikeShard, address_range
from holdfast.core.errors import InvalidArgument, Unsupported


def is_on_meta(value: Any) -> bool:
    """Return True if a tensor, or this rank's shard of it, is on the meta device."""
    return isinstance(value, torch.Tensor) and (value._local_tensor if isinstance(value, DTensor) else value).is_meta


def parse_device(device: Any) -> torch.device | None:
    """Return the device for tensors on the meta device; raises InvalidArgument if tensors cannot be made there."""
    if device is None:
        return None
    try:
        parsed = torch.device(device)
        torch.empty(0, device=parsed)
    except (RuntimeError, TypeError, AssertionError) as error:
        raise InvalidArgument(f"device={device!r}: {str(error).splitlines()[0]}") from error
    if parsed.type == "meta":
        raise InvalidArgument("device='meta': a load makes tensors in memory; name a device such as 'cpu' or 'cuda'")
    return parsed


class MetaTensors:
    """The tensors in memory that take the place of tensors on the meta device.

    They are on `device`; without one, on the device type of their mesh. Plain tensors follow the DTensors of
    the live modules, else torch's default device.
    """

    def __init__(self, device: torch.device | None, modules: Iterable[nn.Module] = ()) -> None:
        self._device = device
        self._modules = list(modules)
        self._made: dict[object, torch.Tensor] = {}  # by the memory they will share
        self._ranges: dict[int, list[tuple[int, int, object, str]]] = {}
        self._used: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # live tensors and those in memory

    def device_for(self, value: torch.Tensor) -> torch.device:
        """Return the device on which the tensor is made."""
        if self._device is not None:
            return self._device
        tensors = (tensor for module in self._modules for tensor in module.parameters())
        mesh = next((tensor.device_mesh for tensor in (value, *tensors) if isinstance(tensor, DTensor)), None)
        device = torch.get_default_device() if mesh is None else torch.device(mesh.device_type)
        if device.type == "meta":
            raise InvalidArgument(
                "the state has tensors on the meta device, and so has torch's default device: call the load outside "
                "of `with torch.device('meta')`, or pass device="
            )
        return device

    def in_memory(self, value: StateTensor, where: str) -> StateTensor:
        """Return the tensor to fill: a tensor in memory for one on the meta device, else the tensor itself."""
        live = value.tensor if isinstance(value, LikeShard) else value
        if not isinstance(live, torch.Tensor) or not is_on_meta(live):
            return value
        made = self._stand_in(live, where)
        self.use(live, made)
        return LikeShard(value.like, made) if isinstance(value, LikeShard) else made

    def _stand_in(self, value: torch.Tensor, where: str) -> torch.Tensor:
        """Return the tensor in memory for one on the meta device, without values; tensors that share memory get one."""
        kind = type(value)
        if kind not in (torch.Tensor, nn.Parameter, DTensor) and not issubclass(kind, nn.Parameter | DTensor):
            raise Unsupported(f"{where}: a {kind.__name__} on the meta device cannot be loaded; load it in memory")
        if weakref.getweakrefs(value):
            raise Unsupported(
                f"{where} is on the meta device, and other code holds a weak reference to it, so that it cannot be "
                "exchanged for a tensor in memory; load it before that code sees it, or call to_empty(device=...) first"
            )
        identity = memory_identity(value)
        if identity not in self._made:
            self._refuse_overlaps(value, identity, where)
            self._made[identity] = torch.empty_like(value.detach(), device=self.device_for(value), requires_grad=False)
        return self._made[identity]

    def _refuse_overlaps(self, value: torch.Tensor, identity: object, where: str) -> None:
        """Raise Unsupported if the tensor shares a part of its memory with another one: apart, they would not."""
        local = value._local_tensor if isinstance(value, DTensor) else value
        size = local.element_size()
        begin = int(local.storage_offset()) * size
        end = begin + address_range(local)[1] - address_range(local)[0]
        others = self._ranges.setdefault(local.untyped_storage()._cdata, [])
        for start, stop, other, name in others:
            if other != identity and start < end and begin < stop:
                raise Unsupported(
                    f"{where} and {name} are on the meta device and share a part of their memory, which a load cannot "
                    "keep; call to_empty(device=...) first, or give each its own tensor"
                )
        others.append((begin, end, identity, where))

    def use(self, live: torch.Tensor, made: torch.Tensor) -> None:
        """Let `made` take the place of a live tensor in `exchange`."""
        self._used[id(live)] = (live, made)

    def is_used(self, live: torch.Tensor) -> bool:
        return id(live) in self._used

    @property
    def has_used(self) -> bool:
        return bool(self._used)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the live tensors on the meta device for those in memory; they remain the same objects."""
        exchanged = list(self._used.values())
        for live, made in exchanged:
            torch.utils.swap_tensors(live, _twin(live, made))  # type: ignore[no-untyped-call]
        self._used.clear()
        self._made.clear()
        numbers = {id(live) for live, _ in exchanged}
        for module in self._modules:
            _reset_shards(module, lambda param: id(param) in numbers)


def _twin(live: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the memory of `made` and everything else of the live tensor."""
    twin: torch.Tensor
    if isinstance(live, nn.Parameter) and type(live) is not nn.Parameter and not isinstance(live, DTensor):
        twin = torch.Tensor._make_subclass(type(live), made, live.requires_grad)
    elif isinstance(live, nn.Parameter):
        twin = nn.Parameter(made, requires_grad=live.requires_grad)
    else:
        twin = made.detach().requires_grad_(live.requires_grad)
    for name, value in vars(live).items():
        vars(twin).setdefault(name, value)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(live, hooks, None):
            setattr(twin, hooks, getattr(live, hooks))
    return twin


def _reset_shards(module: nn.Module, is_exchanged: Callable[[torch.Tensor], bool]) -> None:
    """Let FSDP2 take up the shards, as after `to_empty`; it pads and pins them."""
    for part in module.modules():
        find_state: Any = getattr(part, "_get_fsdp_state", None)
        state = None if find_state is None else find_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for param in group.fsdp_params if group is not None else ():
                if is_exchanged(param.sharded_param):
                    param.reset_sharded_param()
