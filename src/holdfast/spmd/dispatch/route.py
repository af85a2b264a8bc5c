"""The way of a call that the dispatcher's cache does not know: a rule, or torch, or the whole tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, bind, writes_first
from holdfast.spmd.base.collective_errors import name_operator
from holdfast.spmd.base.patched_function import StandIn
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.dispatch.composites import is_whole, take_apart
from holdfast.spmd.dispatch.foreach_by_mesh import is_over_lists, places_by_mesh, run_by_mesh
from holdfast.spmd.dispatch.tracing import answer_in_trace
from holdfast.spmd.sharding.dim_checks import refuse_wrong_dims
from holdfast.spmd.sharding.empty_shards import carry_out, has_empty, pays, run_decision, will_have_empty
from holdfast.spmd.sharding.gather_fallback import gather_and_run
from holdfast.spmd.sharding.gathered_views import is_window, look_through, window
from holdfast.spmd.sharding.index_checks import answer_for_all
from holdfast.spmd.sharding.infeasible_decisions import cannot_be_done
from holdfast.spmd.sharding.mesh_collectives import has_even_shards


@dataclass(slots=True)
class Switch:
    """What is installed, and what was there before."""

    rules: dict[Any, Rule] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    displaced: dict[Any, Any] = field(default_factory=dict)
    methods: list[StandIn] = field(default_factory=list)
    functions: list[StandIn] = field(default_factory=list)
    shardable: list[StandIn] = field(default_factory=list)  # torch's test of whether a dim may be sharded
    losses: dict[Any, Any] = field(default_factory=dict)  # what loss_parallel would have installed
    fallback: bool = False
    lookups: frozenset[Any] = frozenset()  # operators that take indices
    check_indices: bool = False  # those that are sharded too
    is_on: bool = False


class _Known(threading.local):
    """torch's decisions that stand as they are, for calls that the dispatcher's own cache cannot name.

    Of one thread, as torch's cache is: ranks may be threads, and a decision holds its rank's mesh.
    """

    def __init__(self) -> None:
        self.decisions: dict[Hashable, Any] = {}
        self.apart: set[Hashable] = set()  # composites that are taken apart
        self.ruled: set[Hashable] = set()  # calls of even shards that torch does not do right


def make_route(switch: Switch, torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """What stands between the dispatcher's cache and torch's propagation.

    A call that torch does right is answered with torch's decision, which the dispatcher caches as ever. What is
    returned that is no decision is the result of the call, and is not cached.
    """
    known = _Known()

    def slow_path(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        try:
            return routed(op, args, kwargs, info, try_cache)
        except RuntimeError as error:
            name_operator(error, op, (tensor for _, tensor in bind(op, args, kwargs).spots()))
            raise

    def routed(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        if info.compute_mesh.get_coordinate() is None:
            return torch_way(op, args, kwargs, info, try_cache)
        if private.is_tracing():
            rule = switch.rules.get(op)
            call = bind(op, args, kwargs, info)
            family = None if rule is None else rule.family
            return answer_in_trace(call, family, lambda: answered(op, args, kwargs, info, try_cache))
        if private.simulates_ranks():
            try:
                return answered(op, args, kwargs, info, try_cache)
            except Exception:  # noqa: BLE001 - a rule that needs to know its rank cannot run for all of them at once
                return torch_way(op, args, kwargs, info, try_cache)
        return answered(op, args, kwargs, info, try_cache)

    def answered(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        if private.is_oldest() and any(is_window(value) for value in (*args, *kwargs.values())):
            return look_through(op, args, kwargs)
        if op not in switch.rules and private.is_composite(op):
            return _composite(known, torch_way, (op, args, kwargs, info, try_cache))
        if op in switch.lookups and not private.is_tracing():  # a trace has no values to look at
            refused = answer_for_all(bind(op, args, kwargs, info), switch.check_indices)
            if refused is not None:
                return refused
        rule = switch.rules.get(op)
        spares_even = rule is not None and rule.spares_even and private.AT_LEAST_2_13
        key = _name(op, args, kwargs, info, rule is not None) if try_cache or spares_even else None
        if key is not None and private.is_tracing() and not _is_hashable(key):
            key = None  # a trace with symbolic sizes
            if spares_even:
                given = (op, args, kwargs, info, try_cache)
                answer = _spared_symbolic(torch_way, bind(op, args, kwargs, info), given)
                if answer is not None:
                    return answer
        answer = known.decisions.get(key) if key is not None else None
        if answer is None and key is not None and spares_even:
            answer = _spared(known, key, torch_way, bind(op, args, kwargs, info), (op, args, kwargs, info, try_cache))
        if answer is None:
            answer = _answer(switch, torch_way, bind(op, args, kwargs, info), (op, args, kwargs, info, try_cache))
            if key is not None and private.is_decision(answer):
                known.decisions[key] = answer
        if op in switch.lookups and private.is_decision(answer) and (switch.check_indices or answer.needs_redistribute):
            return carry_out(op, args, kwargs, info, answer)  # a decision that is cached would skip the look at indices
        return answer

    private.keep_out_of_dynamo(slow_path)
    return slow_path


def _name(op: Any, args: Any, kwargs: Any, info: Any, ruled: bool) -> Hashable | None:
    """What a decision depends on: torch's description, and for an operator with a rule every other argument too."""
    if not ruled:
        return info.schema  # type: ignore[no-any-return]
    if kwargs:
        return None
    rest = [tuple(value) if isinstance(value, list) else value for value in args if not isinstance(value, torch.Tensor)]
    if any(isinstance(item, torch.Tensor) for value in rest if isinstance(value, tuple) for item in value):
        return None
    return info.schema, tuple(rest)


def _is_hashable(value: Hashable) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _composite(known: _Known, torch_way: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """A composite whole where torch has a decision that stands, else by its parts."""
    op, args, kwargs, info, _ = given
    if is_whole(op, args) and info.schema not in known.apart:
        sharding = _decision(torch_way, bind(op, args, kwargs, info), given)
        if sharding is not None and (_stands(sharding, info) or not private.is_decision(sharding)):
            return sharding
        known.apart.add(info.schema)
    return take_apart(op, args, kwargs)


def _answer(switch: Switch, torch_way: Callable[..., Any], call: Call, given: tuple[Any, ...]) -> Any:
    op, args, kwargs, info, _ = given
    refuse_wrong_dims(call)
    if _has_several_meshes(call) and (switch.fallback or is_over_lists(op)):
        return run_by_mesh(call) if _can_be_split(call) else gather_and_run(call)
    rule = switch.rules.get(op)
    if rule is not None:
        result = rule.run(call)
        if result is not LEAVE:
            return result
        if op in switch.displaced:
            return switch.displaced[op](op, args, kwargs)
    if not switch.fallback:
        return torch_way(*given)
    sharding = _decision(torch_way, call, given)
    if sharding is None or cannot_be_done(sharding, call.op, info):
        return window(gather_and_run(call), call) if private.is_view(op) else gather_and_run(call)
    if not private.is_decision(sharding):
        return sharding
    if writes_first(op) and private.moves_first(sharding, info):
        return gather_and_run(call)  # what is written into a moved copy would be lost
    if private.is_view(op) and private.moves_first(sharding, info):
        return window(carry_out(op, args, kwargs, info, sharding), call)
    if private.is_plain_call(op) and (has_empty(call) or will_have_empty(sharding)):
        return run_decision(call, args, kwargs, sharding)
    return sharding


def _spared(known: _Known, key: Hashable, torch_way: Callable[..., Any], call: Call, given: tuple[Any, ...]) -> Any:
    """torch's decision for even shards, if it sends nothing and leaves no sum; the dispatcher caches it."""
    if key in known.ruled:
        return None
    if all(isinstance(tensor, DTensor) and has_even_shards(tensor) for _, tensor in call.spots()):
        sharding = _decision(torch_way, call, given)
        if _stands(sharding, call.info):
            return sharding
    known.ruled.add(key)
    return None


def _spared_symbolic(torch_way: Callable[..., Any], call: Call, given: tuple[Any, ...]) -> Any:
    """torch's decision for shards of symbolic sizes that are even, if it sends nothing and leaves no sum; else None."""
    if all(isinstance(tensor, DTensor) and has_even_shards(tensor) for _, tensor in call.spots()):
        sharding = _decision(torch_way, call, given)
        return sharding if _stands(sharding, call.info) else None
    return None


def _stands(sharding: Any, info: Any) -> bool:
    """Whether torch has a decision by which every rank works on its own part alone."""
    return (
        private.is_decision(sharding)
        and not private.needs_talk(sharding, info)
        and not any(place.is_partial() for spec in private.specs_in(sharding.output_spec) for place in spec.placements)
    )


def _has_several_meshes(call: Call) -> bool:
    return any(isinstance(tensor, DTensor) and tensor.device_mesh != call.mesh for _, tensor in call.spots())


def _can_be_split(call: Call) -> bool:
    return is_over_lists(call.op) and len(places_by_mesh(call)) > 1


def _decision(torch_way: Callable[..., Any], call: Call, given: tuple[Any, ...]) -> Any:
    """torch's decision, but where some rank has an empty part a silent one if there is any; None if torch has none."""
    try:
        sharding = torch_way(*given)
    except Exception:  # noqa: BLE001 - whatever stopped torch, the gathered call answers or raises its own error
        sharding = None
    else:
        if not private.is_decision(sharding) or not private.needs_talk(sharding, call.info):
            return sharding
    quiet = private.quiet_decision(call.info) if has_empty(call) else None
    return quiet if quiet is not None and pays(quiet, sharding, call.info) else sharding
