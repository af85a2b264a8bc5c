"""The route of a call that the dispatcher's cache does not answer: a rule, torch's decision, or full tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_versions
from holdfast.spmd.base.call import USE_TORCH, Call, bind, writes_first
from holdfast.spmd.base.collective_errors import name_operator
from holdfast.spmd.base.patched_function import PatchedFunction
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_decisions import is_decision, local_decision, moves_first, needs_communication
from holdfast.spmd.base.torch_dispatch import global_outputs, is_composite, is_plain_call, is_view
from holdfast.spmd.base.torch_modes import is_tracing, keep_out_of_dynamo, simulates_ranks
from holdfast.spmd.base.torch_specs import specs_in
from holdfast.spmd.base.torch_versions import is_torch_2_11
from holdfast.spmd.dispatch.composites import decompose, may_run_whole
from holdfast.spmd.dispatch.foreach_by_mesh import indices_by_mesh, is_foreach, run_by_mesh
from holdfast.spmd.dispatch.outside_ranks import is_outside_of_all, run_outside
from holdfast.spmd.dispatch.tracing import run_in_trace
from holdfast.spmd.sharding.dim_checks import check_dims
from holdfast.spmd.sharding.empty_shards import (
    execute_decision,
    has_empty_input,
    local_is_cheaper,
    run_with_empty_shards,
    will_have_empty_input,
)
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.gathered_views import call_on_views, gathered_view, is_gathered_view
from holdfast.spmd.sharding.index_checks import check_on_all_ranks
from holdfast.spmd.sharding.infeasible_decisions import is_infeasible
from holdfast.spmd.sharding.norm_partials import has_norm, keeps_norms, remember_views, run_on_reduced_norms
from holdfast.spmd.sharding.out_variants import has_out, run_with_out
from holdfast.spmd.sharding.plain_tensors import accept_from_gradients, plain_gradients_of, with_replicas
from holdfast.spmd.sharding.shard_sizes import has_even_shards

ATEN = torch.ops.aten
PRODUCTS = frozenset({ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default, ATEN.baddbmm.default, ATEN.mv.default})


@dataclass(slots=True)
class Installed:
    """The rules and replacements that are installed, and what they replaced."""

    rules: dict[Any, Rule] = field(default_factory=dict)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)  # name, family, why it does not fit this torch
    not_chosen: list[tuple[str, str]] = field(default_factory=list)  # name, family
    displaced: dict[Any, Any] = field(default_factory=dict)
    methods: list[PatchedFunction] = field(default_factory=list)
    functions: list[PatchedFunction] = field(default_factory=list)
    shardable: list[PatchedFunction] = field(default_factory=list)  # torch's test of whether a dim can be sharded
    losses: dict[Any, Any] = field(default_factory=dict)  # the handlers that loss_parallel would have installed
    fallback: bool = False
    plain: bool = False
    lookups: frozenset[Any] = frozenset()  # operators that take indices
    check_indices: bool = False  # of sharded index tensors too
    is_on: bool = False


class _KnownDecisions(threading.local):
    """torch's decisions that hold for calls that the dispatcher's own cache cannot key.

    Kept per thread, as torch's cache is: ranks may be threads, and a decision holds its rank's mesh.
    """

    def __init__(self) -> None:
        self.decisions: dict[Hashable, Any] = {}
        self.decomposed: set[Hashable] = set()  # composites that are not run whole
        self.needs_rule: set[Hashable] = set()  # calls with even shards that torch does not handle right


class _Request(NamedTuple):
    """A call as the dispatcher hands it over: the arguments of torch's sharding propagation, in its order."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    info: Any
    try_cache: bool

    def bind(self) -> Call:
        return bind(self.op, self.args, self.kwargs, self.info)


def make_route(installed: Installed, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to put between the dispatcher's cache and torch's sharding propagation.

    For a call that torch handles right, the function returns torch's decision, which the dispatcher caches. Any other
    value that it returns is the result of the call and is not cached.
    """
    known = _KnownDecisions()

    def slow_path(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        request = _Request(op, args, kwargs, info, try_cache)
        try:
            return _route(installed, known, original, request)
        except RuntimeError as error:
            name_operator(error, op, (tensor for _, tensor in request.bind().tensor_args()))
            raise

    keep_out_of_dynamo(slow_path)
    return slow_path


def _route(installed: Installed, known: _KnownDecisions, original: Callable[..., Any], request: _Request) -> Any:
    """Answer a request on a rank outside of the mesh, in a trace, for simulated ranks, or in eager code."""
    if request.info.compute_mesh.get_coordinate() is None:
        return _outside(installed, original, request)
    if is_tracing():
        return _trace(installed, known, original, request)
    if simulates_ranks():
        try:
            return _executed(installed, request, _answer(installed, known, original, request))
        except Exception:  # noqa: BLE001 - a rule that needs its rank cannot run for all ranks at once
            return original(*request)
    return _executed(installed, request, _answer(installed, known, original, request))


def _outside(installed: Installed, original: Callable[..., Any], request: _Request) -> Any:
    """Answer on a rank outside of the mesh: as torch does, else with results without elements."""
    op, call = request.op, request.bind()
    if is_foreach(op) and _has_several_meshes(call) and _can_be_split(call):
        return run_by_mesh(call)  # this rank may be in the next mesh
    rule = installed.rules.get(op)
    if rule is not None:
        accept_from_gradients(*plain_gradients_of(rule.run))
    try:
        if op in installed.displaced:
            return installed.displaced[op](op, request.args, request.kwargs)
        decision = original(*request)
    except Exception:
        result = run_outside(call) if installed.fallback and is_outside_of_all(call) else USE_TORCH
        if result is USE_TORCH:
            raise
        return result
    if not is_decision(decision) or not _is_refused_outside(op, decision, request.info):
        return decision
    result = run_outside(call)
    return decision if result is USE_TORCH else result


def _is_refused_outside(op: Any, decision: Any, info: Any) -> bool:
    """Return True if the dispatcher would raise: for a result that is None, or a write that moves the tensor first."""
    outputs = decision.output_spec
    return (isinstance(outputs, (list, tuple)) and None in outputs) or (
        writes_first(op) and moves_first(decision, info)
    )


def _trace(installed: Installed, known: _KnownDecisions, original: Callable[..., Any], request: _Request) -> Any:
    """Answer in a trace: torch's decision about replicated tensors, else what belongs in a graph."""
    call = request.bind()
    if _is_replicated(call):
        sharding = _decision(original, request)
        if _is_local(sharding, request.info) and all(spec.is_replicated() for spec in specs_in(sharding.output_spec)):
            return sharding
    rule = installed.rules.get(request.op)
    family = None if rule is None else rule.family
    answer = run_in_trace(call, family, lambda: _answer(installed, known, original, request))
    return _executed(installed, request, answer)


def _answer(installed: Installed, known: _KnownDecisions, original: Callable[..., Any], request: _Request) -> Any:
    """Return torch's decision where it is right and known, else the result of a rule or of full tensors."""
    op = request.op
    if is_torch_2_11() and any(is_gathered_view(value) for value in (*request.args, *request.kwargs.values())):
        return call_on_views(op, request.args, request.kwargs)
    if installed.fallback and has_norm(request.bind()):
        return _run_on_norms(original, request)
    if op not in installed.rules and is_composite(op):
        return _composite(known, original, request)
    if op in installed.lookups and not is_tracing():  # a trace has no values
        refused = check_on_all_ranks(request.bind(), installed.check_indices)
        if refused is not None:
            return refused
    rule = installed.rules.get(op)
    torch_first = rule is not None and rule.torch_handles_even and torch_versions.AT_LEAST_2_13
    key = _cache_key(request, rule is not None) if request.try_cache or torch_first else None
    answer = None
    if key is not None and is_tracing() and not _is_hashable(key):  # a trace with symbolic sizes
        key = None
        answer = _decision_if_even(original, request) if torch_first else None
    elif key is not None:
        answer = known.decisions.get(key)
        if answer is None and torch_first and key not in known.needs_rule:
            answer = _decision_if_even(original, request)
            if answer is None:
                known.needs_rule.add(key)
    if answer is None:
        answer = _run(installed, original, request)
        if key is not None and is_decision(answer):
            known.decisions[key] = answer
    return answer


def _executed(installed: Installed, request: _Request, answer: Any) -> Any:
    """Return a decision for the dispatcher to cache and execute, or the result of one that it must not cache."""
    if is_decision(answer) and _must_not_be_cached(installed, request.bind(), answer):
        return execute_decision(request.op, request.args, request.kwargs, request.info, answer)
    return answer


def _has_ambiguous_key(call: Call) -> bool:
    """Return True for a Partial with a number or a 0-dim tensor: torch's cache does not tell the two apart."""
    places = [place for _, tensor in call.tensor_args() if isinstance(tensor, DTensor) for place in tensor.placements]
    if not any(place.is_partial() for place in places):
        return False
    slots = zip(call.op._schema.arguments, call.values, strict=True)
    tensors = [value for argument, value in slots if isinstance(argument.type, torch.TensorType)]
    return len(tensors) > 1 and any(
        value.ndim == 0 if isinstance(value, torch.Tensor) else isinstance(value, (int, float, complex))
        for value in tensors
    )


def _cache_key(request: _Request, ruled: bool) -> Hashable | None:
    """Return what a decision depends on: torch's schema, and for an operator with a rule every other argument."""
    if not ruled:
        return request.info.schema  # type: ignore[no-any-return]
    if request.kwargs:
        return None
    others = (value for value in request.args if not isinstance(value, torch.Tensor))
    rest = tuple(tuple(value) if isinstance(value, list) else value for value in others)
    if any(isinstance(item, torch.Tensor) for value in rest if isinstance(value, tuple) for item in value):
        return None
    return request.info.schema, rest


def _is_hashable(value: Hashable) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _composite(known: _KnownDecisions, original: Callable[..., Any], request: _Request) -> Any:
    """Run a composite whole if torch has a decision without communication, else decompose it."""
    schema = request.info.schema
    if may_run_whole(request.op, request.args) and schema not in known.decomposed:
        sharding = _decision(original, request)
        if sharding is not None and (_is_local(sharding, request.info) or not is_decision(sharding)):
            return sharding
        known.decomposed.add(schema)
    return decompose(request.op, request.args, request.kwargs)


def _run(installed: Installed, original: Callable[..., Any], request: _Request) -> Any:
    op, args, kwargs, info, _ = request
    call = request.bind()
    check_dims(call)
    if _has_several_meshes(call) and (installed.fallback or is_foreach(op)):
        return run_by_mesh(call) if _can_be_split(call) else gather_and_run(call)
    rule = installed.rules.get(op)
    if rule is not None:
        result = rule.run(with_replicas(call))
        if result is not USE_TORCH:
            return result
        if op in installed.displaced:
            return installed.displaced[op](op, args, kwargs)
    if not installed.fallback:
        return original(*request)
    if has_out(op):
        result = run_with_out(call)
        return gather_and_run(call) if result is USE_TORCH else result
    sharding = _decision(original, request)
    if sharding is None and op in PRODUCTS:
        global_outputs(info)  # raises if the sizes do not match, before ranks that differ in them gather
    if sharding is None or is_infeasible(sharding, op, info):
        return gathered_view(gather_and_run(call), call) if is_view(op) else gather_and_run(call)
    if not is_decision(sharding):
        return sharding
    if writes_first(op) and moves_first(sharding, info):
        return gather_and_run(call)  # a write into a redistributed copy would be lost
    if is_view(op) and moves_first(sharding, info):
        return gathered_view(execute_decision(op, args, kwargs, info, sharding), call)
    if is_plain_call(op) and (has_empty_input(call) or will_have_empty_input(sharding)):
        return run_with_empty_shards(call, args, kwargs, sharding)
    return sharding


def _run_on_norms(original: Callable[..., Any], request: _Request) -> Any:
    """Run a call with norms that are not yet reduced among its arguments."""
    op, args, kwargs, info, _ = request
    call = request.bind()
    decision = _decision(original, request) if keeps_norms(call) else None
    if not is_view(op) or is_tracing():
        return run_on_reduced_norms(call) if decision is None else decision
    if decision is None or not is_decision(decision) or moves_first(decision, info):
        return gathered_view(run_on_reduced_norms(call), call)
    return remember_views(call, execute_decision(op, args, kwargs, info, decision))


def _decision_if_even(original: Callable[..., Any], request: _Request) -> Any:
    """Return torch's decision for even shards if it sends nothing and leaves no Partial, else None."""
    tensors = (tensor for _, tensor in request.bind().tensor_args())
    if all(isinstance(tensor, DTensor) and has_even_shards(tensor) for tensor in tensors):
        sharding = _decision(original, request)
        return sharding if _is_local(sharding, request.info) else None
    return None


def _is_local(sharding: Any, info: Any) -> bool:
    """Return True for a decision of torch that sends nothing and leaves no Partial."""
    return (
        is_decision(sharding)
        and not needs_communication(sharding, info)
        and not any(place.is_partial() for spec in specs_in(sharding.output_spec) for place in spec.placements)
    )


def _is_replicated(call: Call) -> bool:
    """Return True if all DTensors of a call are replicated on its mesh, and torch is right whatever their sizes."""
    if _looks_in_place(call.op) or has_out(call.op):
        return False
    if {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape} & set(call.op.tags):
        return False
    return all(
        type(tensor) is DTensor
        and tensor.device_mesh == call.mesh
        and all(place.is_replicate() for place in tensor.placements)
        for _, tensor in call.tensor_args()
        if isinstance(tensor, DTensor)
    )


def _must_not_be_cached(installed: Installed, call: Call, decision: Any) -> bool:
    """Return True if torch's dispatcher would apply a decision wrongly, or reuse it for calls that need another."""
    if _looks_in_place(call.op):  # the dispatcher would return the input
        return True
    if call.op in installed.lookups and (installed.check_indices or decision.needs_redistribute):
        return True  # a cached decision would skip the index checks
    return not is_tracing() and _has_ambiguous_key(call)


def _looks_in_place(op: Any) -> bool:
    """Return True for `x << n` and `x >> n`: torch treats an operator whose name ends in `_` as in place."""
    return op._schema.name.endswith("_") and not op._schema.is_mutable


def _has_several_meshes(call: Call) -> bool:
    return any(isinstance(tensor, DTensor) and tensor.device_mesh != call.mesh for _, tensor in call.tensor_args())


def _can_be_split(call: Call) -> bool:
    return is_foreach(call.op) and len(indices_by_mesh(call)) > 1


def _decision(original: Callable[..., Any], request: _Request) -> Any:
    """Return torch's decision; with empty shards, a cheaper local one if there is any; None if torch has none."""
    info = request.info
    try:
        sharding = original(*request)
    except Exception:  # noqa: BLE001 - the gathered call returns a result or raises its own error
        sharding = None
    else:
        if not is_decision(sharding) or not needs_communication(sharding, info):
            return sharding
    local = local_decision(info) if has_empty_input(request.bind()) else None
    return local if local is not None and local_is_cheaper(local, sharding, info) else sharding
