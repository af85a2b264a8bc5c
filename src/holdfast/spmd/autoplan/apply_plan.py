"""`distribute`: parameters become DTensors by a plan, and hooks redistribute activations and gradients to pins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from holdfast.spmd.autoplan.nested_tensors import map_first_tensor, map_tensors
from holdfast.spmd.autoplan.placement_plan import Pins, Places, Plan, check_model_and_mesh, placements_of
from holdfast.spmd.autoplan.recording import own_tensors
from holdfast.spmd.autoplan.roles import roles_of
from holdfast.spmd.autoplan.unsharded_inputs import ActiveModules
from holdfast.spmd.autoplan.whole_model import parameter_role
from holdfast.spmd.base.spmd_errors import PlanMismatch, SpmdArgumentError

PLAN = "holdfast_plan"  # the attribute of a placed module that a save reads
_SHOWN = 4


def distribute(model: nn.Module, mesh: DeviceMesh, plan: Plan | Mapping[str, Any]) -> nn.Module:
    """Place a model's parameters, buffers and activations as a plan says, in place; collective.

    The model must be initialised. Its inputs may then be plain tensors, equal on every rank; its gradients are placed
    as its parameters are. A checkpoint of the model has the plan in its manifest. Raises PlanMismatch for a plan of
    another mesh or of other roles.
    """
    check_model_and_mesh("distribute", model, mesh)
    plan = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    roles = roles_of(model)
    _check(model, mesh, plan, roles)
    placed: dict[int, torch.Tensor] = {}  # a tensor with several names stays one tensor
    for name, module in model.named_modules():
        for key, tensor in own_tensors(module):
            if id(tensor) not in placed:
                role = parameter_role(f"{name}.{key}" if name else key, roles)
                is_parameter = isinstance(tensor, nn.Parameter)
                made = _placed(tensor, mesh, plan.placements(role)) if is_parameter else _replica(tensor, mesh)
                placed[id(tensor)] = made
            setattr(module, key, placed[id(tensor)])
    pins, active = dict(plan.activations), ActiveModules()
    for name, module in model.named_modules():
        _hook(module, mesh, pins.get(roles[name], Pins(None, None)), active, is_root=not name)
    setattr(model, PLAN, plan.to_dict())
    return model


def _check(model: nn.Module, mesh: DeviceMesh, plan: Plan, roles: Mapping[str, str]) -> None:
    sizes = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    wanted = tuple(size for _, size in plan.mesh)
    if sizes != wanted:
        raise PlanMismatch(f"the plan is for a mesh of {wanted}, this mesh is {sizes}: plan again for it")
    own = {parameter_role(key, roles): parameter for key, parameter in model.named_parameters()}
    named = dict(plan.parameters)
    if own.keys() != named.keys():
        lacking, unknown = sorted(own.keys() - named.keys()), sorted(named.keys() - own.keys())
        raise PlanMismatch(
            f"the plan is for another model: it lacks {_list_text(lacking)} of this model; "
            f"it has {_list_text(unknown)}, which this model lacks: plan again for it"
        )
    for role, parameter in own.items():
        if isinstance(parameter, DTensor):
            raise SpmdArgumentError(f"{role} is placed already: distribute a model of plain tensors")
        if any(place >= parameter.ndim for place in named[role]):
            raise PlanMismatch(f"the plan shards {role} by dim {max(named[role])}, but it has {parameter.ndim} dims")


def _list_text(roles: list[str]) -> str:
    more = f" and {len(roles) - _SHOWN} more" if len(roles) > _SHOWN else ""
    return (", ".join(roles[:_SHOWN]) or "nothing") + more


def _placed(parameter: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> nn.Parameter:
    whole = distribute_tensor(parameter.detach(), mesh, placements)
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    if made.requires_grad:
        made.register_hook(lambda gradient: _redistributed(gradient, placements))  # type: ignore[no-untyped-call]
    return made


def _redistributed(gradient: torch.Tensor, placements: list[Placement]) -> torch.Tensor:
    return gradient.redistribute(placements=placements) if isinstance(gradient, DTensor) else gradient


def _replica(tensor: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _hook(module: nn.Module, mesh: DeviceMesh, pins: Pins, active: ActiveModules, *, is_root: bool) -> None:
    # Integers that a model uses before it calls its modules, such as masks and keys, stay plain.
    keeps_integers_plain = is_root and pins.takes is None

    def as_input(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if keeps_integers_plain and not tensor.is_floating_point() else _replica(tensor, mesh)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        active.enter(module, lambda tensor: _replica(tensor, mesh))
        return map_first_tensor(map_tensors((args, kwargs), as_input), _pin(pins.takes))

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        out = map_first_tensor(out, _pin(pins.gives))
        return map_tensors(out, _summed) if is_root else out

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
    module.register_forward_hook(lambda module, args, out: active.leave(module), always_call=True)


def _pin(places: Places | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that redistributes a tensor, and its gradient back."""
    if places is None:
        return lambda tensor: tensor
    placements = placements_of(places)

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor) or any(place >= tensor.ndim for place in places):
            return tensor
        return tensor.redistribute(placements=placements)

    return pin


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
        whole = [Replicate() if place.is_partial() else place for place in tensor.placements]
        return tensor.redistribute(placements=whole)
    return tensor
