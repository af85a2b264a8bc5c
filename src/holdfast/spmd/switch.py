"""Turning the rules on and off: the only state of holdfast.spmd, kept in torch's own dispatcher."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, bind
from holdfast.spmd.empties import carry_out, has_empty, run_decision, will_have_empty
from holdfast.spmd.fallback import gather_and_run
from holdfast.spmd.methods import install_methods, remove_methods
from holdfast.spmd.plain import INDEXING, accept_plain
from holdfast.spmd.registry import Rule, all_rules
from holdfast.spmd.rules.pointwise import pointwise
from holdfast.spmd.windows import window


@dataclass(slots=True)
class Switch:
    """What is installed, and what was there before."""

    rules: dict[Any, Rule] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)
    displaced: dict[Any, Any] = field(default_factory=dict)
    added: list[Any] = field(default_factory=list)
    gathered: Counter[str] = field(default_factory=Counter)  # calls that torch refused and that were run on the whole
    fallback: bool = False
    is_on: bool = False


SWITCH = Switch()


def enable(only: Sequence[str] = ("*",), exclude: Sequence[str] = ()) -> list[str]:
    """Give DTensor the rules that torch lacks or gets wrong; returns what was left out, and why.

    `only` and `exclude` are patterns over families ("indexing") and operators ("mse_loss.default"); "fallback" is
    the gathering of calls that torch refuses. Calling it again replaces the choice.
    """
    disable()
    problem = private.check()
    if problem is not None:
        SWITCH.left_out = [("*", problem)]
        return [problem]
    for rule in all_rules():
        for name in rule.operators:
            _add(rule, name, only, exclude)
    SWITCH.fallback = _is_chosen(("fallback",), only, exclude)
    slow_path = _route(getattr(private.dispatcher(), private.SLOW_PATH))
    private.override(private.SLOW_PATH, slow_path)
    for name in INDEXING if _is_chosen(("plain",), only, exclude) else ():
        if (op := private.operator(name)) is not None:
            private.handlers()[op] = accept_plain(slow_path)
            SWITCH.added.append(op)
    private.override(private.REPLICATE_PLAIN, _replicate_plain(getattr(private.dispatcher(), private.REPLICATE_PLAIN)))
    if _is_chosen(("methods",), only, exclude):
        install_methods()
    private.forget_decisions()
    SWITCH.is_on = True
    return [f"{name}: {why}" for name, why in SWITCH.left_out]


def disable() -> None:
    """Put torch back exactly as it was."""
    if not SWITCH.is_on:
        return
    private.restore(private.SLOW_PATH)
    private.restore(private.REPLICATE_PLAIN)
    table = private.handlers()
    for op in SWITCH.added:
        table.pop(op, None)
    for op, handler in SWITCH.displaced.items():
        table[op] = handler
    remove_methods()
    private.forget_decisions()
    SWITCH.rules, SWITCH.left_out, SWITCH.displaced, SWITCH.added, SWITCH.is_on = {}, [], {}, [], False


def _is_chosen(words: Sequence[str], only: Sequence[str], exclude: Sequence[str]) -> bool:
    def matches(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(word, pattern) for word in words for pattern in patterns)

    return matches(only) and not matches(exclude)


def _add(rule: Rule, name: str, only: Sequence[str], exclude: Sequence[str]) -> None:
    op = private.operator(name)
    if not _is_chosen((rule.family, name), only, exclude):
        SWITCH.left_out.append((name, "not chosen"))
    elif op is None:
        SWITCH.left_out.append((name, f"torch {torch.__version__} has no such operator"))
    else:
        SWITCH.rules[op] = rule
        table = private.handlers()
        if op in table:  # torch's own handler would come before ours
            SWITCH.displaced[op] = table.pop(op)


def _route(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """Between the dispatcher's cache and torch's propagation: a call that torch does right is cached as ever.

    What is returned here that is no sharding is the result of the call, and is not cached.
    """

    def slow_path(op: Any, args: Any, kwargs: Any, info: Any, try_cache: bool) -> Any:
        if private.is_tracing():
            return torch_way(op, args, kwargs, info, try_cache)
        rule = SWITCH.rules.get(op)
        if rule is not None:
            result = rule.run(bind(op, args, kwargs, info))
            if result is not LEAVE:
                return result
            if op in SWITCH.displaced:
                return SWITCH.displaced[op](op, args, kwargs)
        if not SWITCH.fallback:
            return torch_way(op, args, kwargs, info, try_cache)
        try:
            sharding = torch_way(op, args, kwargs, info, try_cache)
        except Exception:  # noqa: BLE001 - whatever stopped torch, the gathered call answers or raises its own error
            call = bind(op, args, kwargs, info)
            SWITCH.gathered[str(op)] += 1
            return window(gather_and_run(call), call) if private.is_view(op) else gather_and_run(call)
        if not private.is_decision(sharding):
            return sharding
        if private.is_view(op) and private.moves_first(sharding, info):
            return window(carry_out(op, args, kwargs, info, sharding), bind(op, args, kwargs, info))
        if not private.is_plain_call(op):
            return sharding
        return _despite_empties(bind(op, args, kwargs, info), args, kwargs, sharding)

    return slow_path


def _despite_empties(call: Call, args: Any, kwargs: Any, sharding: Any) -> Any:
    """torch's decision, unless some rank has an empty part: then what nothing needs to talk about stays silent."""
    moves = bool(private.decided_specs(sharding))
    if has_empty(call):
        if private.is_pointwise(call.op):
            return pointwise(call) if moves else sharding
        return run_decision(call, args, kwargs, sharding)
    return run_decision(call, args, kwargs, sharding) if will_have_empty(sharding) else sharding


def _replicate_plain(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """Plain integer and bool tensors are indices and masks: the same on every rank."""

    def replicate(op: Any, tensor: torch.Tensor, mesh: Any) -> Any:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or isinstance(tensor, DTensor):
            return torch_way(op, tensor, mesh)
        placements = [private.REPLICATE] * mesh.ndim
        return private.make_spec(mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)

    return replicate
