"""`plan`: try every stream between branches, select the options under it, return the cheapest within memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.spmd.autoplan.branch_walk import AxisTerms
from holdfast.spmd.autoplan.nested_tensors import tensors_in
from holdfast.spmd.autoplan.partition import Partition, PlannedBranch
from holdfast.spmd.autoplan.placement_options import Explorer
from holdfast.spmd.autoplan.placement_plan import Plan, check_model_and_mesh
from holdfast.spmd.autoplan.reasons import reasons
from holdfast.spmd.autoplan.recording import Inputs, Recording, arguments_of, record
from holdfast.spmd.autoplan.roles import roles_of
from holdfast.spmd.autoplan.selection import Limit, Selection, select
from holdfast.spmd.autoplan.unassigned import unassigned_roles, with_shared_placements
from holdfast.spmd.autoplan.units import WHOLE
from holdfast.spmd.autoplan.whole_model import WholeModelPlacement, parameter_role, place_whole_model
from holdfast.spmd.base.spmd_errors import SpmdArgumentError

FLOPS_PER_BYTE = 1000.0  # operations of an accelerator while its link transfers one byte
STREAMS = (WHOLE, 0, 1)  # between branches: whole, by batch, or by sequence (channel for images)
SLACK = 1.25  # over an even division of the matrices if no memory is given: small ones may stay whole
NEAR = 1.1  # the error of estimates of run-time traffic, such as tokens to experts


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """The best selection under one stream."""

    terms: tuple[AxisTerms, ...]
    selection: Selection
    placement: WholeModelPlacement
    unassigned: tuple[str, ...]
    held: float
    excess: float

    @property
    def rank(self) -> tuple[float, float, float]:
        work = self.selection.score - self.selection.moved
        return self.excess, work + self.placement.moved, self.selection.kept


def plan(
    model: nn.Module,
    mesh: DeviceMesh,
    example_inputs: Inputs,
    *,
    memory: int | None = None,
    flops_per_byte: float = FLOPS_PER_BYTE,
) -> Plan:
    """Propose placements for a model's parameters and activations over a mesh, with reasons.

    `example_inputs` are the model's inputs: a list, a dict of named inputs, or one tensor. Nothing is computed and
    nothing is sent: the forward is recorded on meta tensors. Every placement of a branch is costed by the bytes that a
    rank receives and by its work; `flops_per_byte` operations weigh as much as one byte. A rank holds at most `memory`
    bytes of parameters, gradients and results kept for backward. Without `memory`, a rank holds at most a quarter more
    than if the last axis divided every matrix evenly.

    The model is not changed, and every rank finds the same plan. Raises SpmdArgumentError if no plan fits the memory,
    UnsupportedCall if a module reads values and is not a unit.
    """
    check_model_and_mesh("plan", model, mesh)
    recording = record(model, example_inputs)
    roles = roles_of(model)
    explorer = Explorer(recording, _biases(model), flops_per_byte)
    partition = Partition(model, roles, explorer)
    limit = _even_limit(recording, mesh) if memory is None else Limit(math.inf, memory)
    candidates = []
    for terms in _terms(mesh, example_inputs):
        one = _candidate(recording, partition, terms, roles, limit)
        candidates += [] if one is None else [one]
    best = _best(candidates, any(way.exchanged for step in recording.steps for way in step.ways))
    if memory is not None and best.excess:
        holds = math.ceil(best.held + best.selection.kept)
        raise SpmdArgumentError(
            f"memory={memory}: the best plan for this mesh takes {holds} bytes on a rank "
            f"({math.ceil(best.held)} of parameters and gradients, {math.ceil(best.selection.kept)} kept for "
            "backward): allow that much, or take a larger mesh or a smaller example"
        )
    return _plan(recording, mesh, best, candidates, roles)


def _best(candidates: Sequence[PlanCandidate], is_estimate: bool) -> PlanCandidate:
    """Return the cheapest candidate; among those within the error of an estimate, the one that keeps least.

    There is always one: under a whole stream all parameters may stay whole.
    """
    best = min(candidates, key=lambda one: one.rank)
    if not is_estimate:
        return best
    near = [one for one in candidates if one.excess <= best.excess and one.rank[1] <= NEAR * best.rank[1]]
    return min(near, key=lambda one: (round(one.selection.kept), [-term.stream for term in one.terms], one.rank))


def _candidate(
    recording: Recording, partition: Partition, terms: tuple[AxisTerms, ...], roles: Mapping[str, str], limit: Limit
) -> PlanCandidate | None:
    """Return the best selection that the rest of the model permits: parameters used there may have to stay whole."""
    parts = partition.parts(terms)
    nothing: list[list[PlannedBranch]] = [[]] if all(term.stream == WHOLE for term in terms) else []
    for some in itertools.chain([parts], with_shared_placements(recording, parts, roles), nothing):
        unassigned = unassigned_roles(recording, some, roles)
        taken = 2 * sum(unassigned.values())
        selection = select(some, Limit(limit.held - taken, limit.memory - taken))
        placement = place_whole_model(recording, partition, selection, terms, roles)
        if placement is not None:
            held = _held(recording, placement, terms, roles)
            return PlanCandidate(
                terms, selection, placement, tuple(unassigned), held, limit.excess(held, selection.kept)
            )
    return None


def _held(
    recording: Recording, placement: WholeModelPlacement, terms: tuple[AxisTerms, ...], roles: Mapping[str, str]
) -> float:
    """Return the bytes of parameters and gradients on each rank."""
    total = 0.0
    for value in recording.values:
        if value.key is not None:
            places = placement.parameters.get(parameter_role(value.key, roles), ())
            shards = math.prod(term.ranks for term, place in zip(terms, places, strict=False) if place != WHOLE)
            total += 2 * value.bytes / shards
    return total


def _terms(mesh: DeviceMesh, example_inputs: Inputs) -> Iterator[tuple[AxisTerms, ...]]:
    """Yield every stream: for each axis a dim or none; a dim may serve several axes if the example divides."""
    sizes = [mesh.size(axis) for axis in range(mesh.ndim)]
    inputs = tensors_in(arguments_of(example_inputs))
    shape = tuple(inputs[0].shape) if inputs else ()
    for streams in itertools.product(*(STREAMS if size > 1 else (WHOLE,) for size in sizes)):
        for dim in (0, 1):
            ranks = math.prod(size for size, stream in zip(sizes, streams, strict=True) if stream == dim)
            if ranks > 1 and (len(shape) <= dim or shape[dim] % ranks):
                break
        else:
            yield tuple(
                AxisTerms(size, stream, 1.0 if mesh.device_type == "cpu" else 1 / size)  # no all-to-all on CPU meshes
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
    """Return biases by the weights with the same rows."""
    biases = {}
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        weight, bias = own.get("weight"), own.get("bias")
        if weight is not None and bias is not None and weight.ndim > 1 and bias.shape == weight.shape[:1]:
            prefix = f"{name}." if name else ""
            biases[f"{prefix}weight"] = f"{prefix}bias"
    return biases


def _plan(
    recording: Recording,
    mesh: DeviceMesh,
    best: PlanCandidate,
    candidates: Sequence[PlanCandidate],
    roles: Mapping[str, str],
) -> Plan:
    names = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    streams = [(tuple(term.stream for term in one.terms), one.placement.moved, one.excess) for one in candidates]
    keys = dict.fromkeys(value.key for value in recording.values if value.key is not None)
    whole = {parameter_role(key, roles): (WHOLE,) * mesh.ndim for key in keys}
    parameters = whole | best.placement.parameters
    return Plan(
        tuple((name, mesh.size(axis)) for axis, name in enumerate(names)),
        tuple(parameters.items()),
        tuple(best.placement.activations.items()),
        round(best.placement.moved),
        round(best.held),
        round(best.selection.kept),
        reasons(best.selection, tuple(term.stream for term in best.terms), streams, best.unassigned),
    )
