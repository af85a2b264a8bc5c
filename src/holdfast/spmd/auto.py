"""Placements for a model's parameters, found by trying: the fewest bytes among plans that hold no large weight whole.

Each candidate is run once, forward and backward, on the example inputs, and what its collectives are given is
counted: what the plan promises is what was measured, for DTensor's own propagation and these rules alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.core.errors import InvalidArgument

CHOICES = ("rows", "columns")  # of the weight: Shard(0) or Shard(1)
COLLECTIVES = ("_c10d_functional", "c10d", "_dtensor")


@dataclass(frozen=True, slots=True)
class Plan:
    """For each role (a module's name with its numbers as stars): how its weight is sharded, what it costs, and why."""

    choices: tuple[tuple[str, str], ...]
    moved_bytes: int  # given to collectives by each rank, in one forward and backward of the examples
    held_bytes: int  # parameters on each rank
    why: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "choices": dict(self.choices),
            "moved_bytes": self.moved_bytes,
            "held_bytes": self.held_bytes,
            "why": list(self.why),
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote; raises InvalidArgument where it is none."""
        choices = value.get("choices")
        if not isinstance(choices, dict) or any(choice not in (*CHOICES, "whole") for choice in choices.values()):
            raise InvalidArgument(f"no plan: choices must map roles to rows, columns or whole, found {choices!r}")
        return cls(
            tuple((str(role), str(choice)) for role, choice in choices.items()),
            int(value.get("moved_bytes", 0)),
            int(value.get("held_bytes", 0)),
            tuple(str(line) for line in value.get("why", ())),
        )


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that collectives are given."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in COLLECTIVES and func._opname != "wait_tensor":
            self.bytes += sum(value.nbytes for value in args if isinstance(value, torch.Tensor))
        return func(*args, **(kwargs or {}))


def plan(
    make: Callable[[], nn.Module],
    mesh: DeviceMesh,
    example_inputs: Sequence[torch.Tensor],
    *,
    shard_above: int = 256,
) -> Plan:
    """Propose how the linear layers and embeddings of `make()` are sharded over a mesh of one axis; collective.

    Every weight of at least `shard_above` elements is sharded; which way costs the fewest bytes is tried role by role
    and pair by pair. `make` builds the same model each time it is called, on every rank.
    """
    if mesh.ndim != 1:
        raise InvalidArgument(f"a plan is for one mesh axis, not {mesh.ndim}: give the mesh of the axis to shard over")
    roles = _roles(make(), shard_above)
    tried: dict[tuple[str, ...], int] = {}

    def cost(choices: tuple[str, ...]) -> int:
        if choices not in tried:
            tried[choices] = _measure(make(), mesh, dict(zip(roles, choices, strict=True)), example_inputs)
        return tried[choices]

    best = ("rows",) * len(roles)
    for width in (1, 2, 1):
        for place in range(len(roles) - width + 1):
            variants = [_with(best, place, width, number) for number in range(2**width)]
            best = min(variants, key=lambda choices: (cost(choices), choices != best))
    chosen = dict(zip(roles, best, strict=True))
    model = distribute(make(), mesh, chosen)
    held = sum(_local(parameter).nbytes for parameter in model.parameters())
    return Plan(tuple(chosen.items()), cost(best) if roles else 0, held, _reasons(roles, best, cost))


def _with(choices: tuple[str, ...], place: int, width: int, number: int) -> tuple[str, ...]:
    turned = list(choices)
    for offset in range(width):
        turned[place + offset] = CHOICES[number >> offset & 1]
    return tuple(turned)


def _reasons(roles: Sequence[str], best: tuple[str, ...], cost: Callable[[tuple[str, ...]], int]) -> tuple[str, ...]:
    lines = []
    for place, role in enumerate(roles):
        other = _with(best, place, 1, 1 - CHOICES.index(best[place]))
        lines.append(f"{role}: {best[place]}, {cost(best)} bytes; by {other[place]} it would be {cost(other)}")
    return tuple(lines)


def _role(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _roles(model: nn.Module, shard_above: int) -> list[str]:
    """The roles of the modules whose weights are to be sharded, in the order of the model."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) and module.weight.numel() >= shard_above:
            found[_role(name)] = None
    return list(found)


def _measure(
    model: nn.Module, mesh: DeviceMesh, choices: Mapping[str, str], example_inputs: Sequence[torch.Tensor]
) -> int:
    distribute(model, mesh, choices)
    inputs = [distribute_tensor(value, mesh, [Replicate()]) for value in example_inputs]
    with _Count() as count:
        out = model(*inputs)
        out.redistribute(placements=[Replicate()]).sum().backward()
    return int(count.bytes)


def distribute(model: nn.Module, mesh: DeviceMesh, plan: Plan | Mapping[str, str]) -> nn.Module:
    """Place a model's parameters and buffers as a plan says, in place; what it does not name is replicated."""
    choices = dict(plan.choices) if isinstance(plan, Plan) else dict(plan)
    for name, module in model.named_modules():
        choice = choices.get(_role(name), "whole") if isinstance(module, (nn.Linear, nn.Embedding)) else "whole"
        for key, parameter in list(module.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [_placement(choice, key)])
            setattr(module, key, nn.Parameter(placed, requires_grad=parameter.requires_grad))
        for key, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(key, distribute_tensor(buffer, mesh, [Replicate()]))
    return model


def _placement(choice: str, key: str) -> Placement:
    if choice == "rows":
        return Shard(0)
    return Shard(1) if choice == "columns" and key == "weight" else Replicate()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
