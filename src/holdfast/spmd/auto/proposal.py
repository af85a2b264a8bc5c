"""Proposing a plan: the stream between branches is tried every way, and each branch is placed best under it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.placing import WHOLE
from holdfast.spmd.auto.cover import Cover
from holdfast.spmd.auto.options import Explorer
from holdfast.spmd.auto.reasons import reasons
from holdfast.spmd.auto.recording import Recording, record, tensors_in
from holdfast.spmd.auto.roles import roles_of
from holdfast.spmd.auto.selection import Limit, Selection, select
from holdfast.spmd.auto.thread import Threaded, parameter_role, thread
from holdfast.spmd.auto.values import Plan
from holdfast.spmd.auto.walk import Terms

FLOPS_PER_BYTE = 1000.0  # what an accelerator computes while its link brings one byte
STREAMS = (WHOLE, 0, 1)  # between branches: whole, or by batch, or by sequence (of images: by channel)
SLACK = 1.1  # over an even division of the matrices, where no memory is given


@dataclass(frozen=True, slots=True)
class Found:
    """The best selection under one stream."""

    terms: tuple[Terms, ...]
    selection: Selection
    threaded: Threaded
    excess: float

    @property
    def rank(self) -> tuple[float, float, float]:
        work = self.selection.score - self.selection.moved
        return self.excess, work + self.threaded.moved, self.selection.kept


def plan(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Sequence[Any],
    *,
    memory: int | None = None,
    flops_per_byte: float = FLOPS_PER_BYTE,
) -> Plan:
    """Propose placements for a model's parameters and activations over a mesh, and say why.

    Nothing is computed and nothing communicated: the forward is recorded on tensors without contents, and every way
    to place a branch is costed by the bytes that a rank receives and by the work that it does, of which
    `flops_per_byte` weigh as much as one byte. A rank holds at most `memory` bytes of parameters, gradients and
    results kept for backward; without it, at most a tenth more than if the last axis divided every matrix evenly.
    The model is not changed, and every rank finds the same plan. Raises InvalidArgument where no plan keeps the
    memory, Unsupported where a module looks at values and is no unit.
    """
    recording = record(model, example_inputs)
    roles = roles_of(model)
    explorer = Explorer(recording, _biases(model), flops_per_byte)
    cover = Cover(model, roles, explorer)
    limit = _even_limit(recording, mesh) if memory is None else Limit(math.inf, memory)
    found = []
    for terms in _terms(mesh, example_inputs):
        parts = cover.parts(terms)
        selection = None if not parts else select(parts, limit)
        threaded = None if selection is None else thread(recording, cover, selection, terms, roles)
        if selection is not None and threaded is not None:
            found.append(Found(terms, selection, threaded, limit.excess(selection)))
    if not found:
        raise Unsupported("no plan was found: no module of the model has parameters and a tensor as its first input")
    best = min(found, key=lambda one: one.rank)
    if memory is not None and best.excess:
        holds = math.ceil(best.selection.held + best.selection.kept)
        raise InvalidArgument(
            f"memory={memory}: the best plan for this mesh takes {holds} bytes on a rank "
            f"({math.ceil(best.selection.held)} of parameters and gradients, {math.ceil(best.selection.kept)} kept for "
            "backward): allow that much, or take a larger mesh or a smaller example"
        )
    return _plan(recording, mesh, best, found, roles)


def _terms(mesh: DeviceMesh, example_inputs: Sequence[Any]) -> Iterator[tuple[Terms, ...]]:
    """Every stream: for each axis a dim, or none; a dim may serve several axes where the example divides."""
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    inputs = tensors_in(list(example_inputs))
    shape = tuple(inputs[0].shape) if inputs else ()
    for streams in itertools.product(*(STREAMS if size > 1 else (WHOLE,) for size in sizes)):
        for dim in (0, 1):
            together = math.prod(size for size, stream in zip(sizes, streams, strict=True) if stream == dim)
            if together > 1 and (len(shape) <= dim or shape[dim] % together):
                break
        else:
            yield tuple(
                Terms(size, stream, 1.0 if mesh.device_type == "cpu" else 1 / size)  # no all-to-all on CPU meshes
                for size, stream in zip(sizes, streams, strict=True)
            )


def _even_limit(recording: Recording, mesh: DeviceMesh) -> Limit:
    sizes = [mesh.size(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    ranks = sizes[-1] if sizes else 1
    total = 0.0
    for value in recording.values:
        if value.key is not None:
            divides = len(value.shape) > 1 and any(size % ranks == 0 for size in value.shape)
            total += 2 * (SLACK * value.bytes / ranks if divides else value.bytes)
    return Limit(total, math.inf)


def _biases(model: nn.Module) -> dict[str, str]:
    """Biases by the weights whose rows they belong to."""
    found = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        weight, bias = own.get("weight"), own.get("bias")
        if weight is not None and bias is not None and weight.ndim > 1 and bias.shape == weight.shape[:1]:
            prefix = f"{name}." if name else ""
            found[f"{prefix}weight"] = f"{prefix}bias"
    return found


def _plan(
    recording: Recording, mesh: DeviceMesh, best: Found, found: Sequence[Found], roles: Mapping[str, str]
) -> Plan:
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    streams = [(tuple(term.stream for term in one.terms), one.threaded.moved, one.excess) for one in found]
    keys = dict.fromkeys(value.key for value in recording.values if value.key is not None)
    whole = {parameter_role(key, roles): (WHOLE,) * mesh.ndim for key in keys}
    parameters = whole | best.threaded.parameters
    return Plan(
        tuple((name, mesh.size(axis)) for axis, name in enumerate(names)),
        tuple(parameters.items()),
        tuple(best.threaded.activations.items()),
        round(best.threaded.moved),
        round(best.selection.held),
        round(best.selection.kept),
        reasons(best.selection, tuple(term.stream for term in best.terms), streams, roles),
    )
