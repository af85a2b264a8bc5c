"""Turning the rules on and off: the only state of holdfast.spmd, kept in torch's own dispatcher."""

from __future__ import annotations

import fnmatch
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd import torch_private as private
from holdfast.spmd.agreement import LOOKUPS
from holdfast.spmd.errors import SpmdArgumentError, warn
from holdfast.spmd.fallback import GATHERED
from holdfast.spmd.functions import install_functions
from holdfast.spmd.lossparallel import loss_handlers
from holdfast.spmd.methods import METHODS, install_methods, remove_methods
from holdfast.spmd.plain import (
    INDEXING,
    MASKING,
    SAMPLING,
    take_flip,
    take_made,
    take_masks,
    take_plain,
    take_samples,
)
from holdfast.spmd.private_names import misfits
from holdfast.spmd.registry import Rule, all_rules
from holdfast.spmd.route import Switch, make_route
from holdfast.spmd.windows import Window, mark_stale

SWITCH = Switch()
OURS = (
    mark_stale,
    take_flip,
    take_made,
    take_masks,
    take_plain,
    take_samples,
)  # handlers that the dispatcher's own table is given
PARTS = ("fallback", "functions", "loss_parallel", "methods", "plain")  # what may be chosen beside rules


def enable(only: Sequence[str] = ("*",), exclude: Sequence[str] = (), check_indices: bool = False) -> list[str]:
    """Give DTensor the rules that torch lacks or gets wrong; returns what was left out, and why.

    `only` and `exclude` are patterns over families ("indexing") and operators ("mse_loss.default"); "fallback" is
    the gathering of calls that torch refuses. Calling it again replaces the choice. Raises SpmdArgumentError for a
    pattern that names nothing, and leaves the choice as it was.

    With `check_indices` an index out of range in a tensor of indices that is itself sharded raises on every rank, for
    two numbers sent in each such lookup; without it only the ranks that have it raise, as with torch alone.
    """
    _check("only", only)
    _check("exclude", exclude)
    if private.in_loss_parallel():
        raise SpmdArgumentError("enable() within loss_parallel(): call it before, since that puts back what it found")
    disable()
    problem = private.check()
    if problem is not None:
        warn(f"holdfast.spmd.enable: {problem}")
        SWITCH.left_out = [(name, problem) for rule in all_rules() for name in rule.operators]
        return _left_out()
    SWITCH.is_on = True
    unfit = misfits()
    for part, problems in unfit.items():
        SWITCH.left_out.append((part, f"torch {torch.__version__} is not as expected: {'; '.join(problems)}"))
    if unfit:
        warn(f"holdfast.spmd.enable: {'; '.join(_left_out())}")
    try:
        _install(only, [*exclude, *unfit], check_indices)
    except BaseException:
        disable()
        raise
    return _left_out()


def _install(only: Sequence[str], exclude: Sequence[str], check_indices: bool) -> None:
    for rule in all_rules():
        for name in rule.operators:
            _add(rule, name, only, exclude)
    SWITCH.fallback = _is_chosen(("fallback",), only, exclude)
    if check_indices or _is_chosen(("indexing",), only, exclude):
        SWITCH.lookups = frozenset(filter(None, map(private.operator, LOOKUPS)))
    SWITCH.check_indices = check_indices
    slow_path = make_route(SWITCH, getattr(private.dispatcher(), private.SLOW_PATH))
    private.override(private.SLOW_PATH, slow_path)
    if _is_chosen(("plain",), only, exclude):
        _accept_plain()
        torch_way = getattr(private.dispatcher(), private.REPLICATE_PLAIN)
        private.override(private.REPLICATE_PLAIN, _replicate_plain(torch_way))
    if _is_chosen(("loss", "loss_parallel"), only, exclude):
        SWITCH.losses = dict(private.loss_parallel_table())
        private.loss_parallel_table().update(loss_handlers(SWITCH.losses))
    if _is_chosen(("methods",), only, exclude):
        SWITCH.methods = install_methods()
    if _is_chosen(("functions",), only, exclude):
        SWITCH.functions = install_functions()
    if SWITCH.fallback:
        SWITCH.shardable = private.allow_empty_shards()
    for function in (*OURS, *(method for method, _ in METHODS.values()), Window.__torch_dispatch__):
        private.keep_out_of_dynamo(function)
    if not private.forget_decisions() and threading.active_count() > 1:
        warn(
            "holdfast.spmd.enable: other threads may have used DTensors before, and this Python cannot clear what "
            "torch remembers of that: call enable() before the first thread starts"
        )


def _check(option: str, patterns: Sequence[str]) -> None:
    """Refuse what would silently choose nothing: one word in place of a list, or a word that no rule goes by."""
    families = {rule.family for rule in all_rules()} | set(PARTS)
    if isinstance(patterns, str):
        raise SpmdArgumentError(f"{option}={patterns!r}: give a list of patterns, like {option}=[{patterns!r}]")
    words = [*families, *(name for rule in all_rules() for name in rule.operators)]
    for pattern in patterns:
        if not isinstance(pattern, str) or not _matches(words, [pattern]):
            raise SpmdArgumentError(
                f"{option}: {pattern!r} is no family and no operator with a rule: give an operator, "
                f"like 'mse_loss.default', or a family: {', '.join(sorted(families))}"
            )


def _left_out() -> list[str]:
    return [f"{name}: {why}" for name, why in SWITCH.left_out]


def disable() -> None:
    """Put torch back exactly as it was."""
    SWITCH.left_out = []
    if not SWITCH.is_on:
        return
    private.restore(private.SLOW_PATH)
    private.restore(private.REPLICATE_PLAIN)
    table = private.handlers()
    for op in [op for op, handler in table.items() if handler in OURS]:
        del table[op]
    for op, handler in SWITCH.displaced.items():
        table[op] = handler
    private.loss_parallel_table().update(SWITCH.losses)
    remove_methods()
    for stand_in in reversed([*SWITCH.methods, *SWITCH.functions, *SWITCH.shardable]):
        stand_in.remove()
    private.forget_decisions()
    SWITCH.rules, SWITCH.displaced, SWITCH.is_on = {}, {}, False
    SWITCH.methods, SWITCH.functions, SWITCH.shardable = [], [], []
    SWITCH.losses, SWITCH.lookups = {}, frozenset()
    GATHERED.clear()


def _accept_plain() -> None:
    """Put handlers before the dispatcher's own check, which refuses plain tensors."""
    for names, handler in ((INDEXING, take_plain), (MASKING, take_masks), (SAMPLING, take_samples)):
        for name in names:
            if (op := private.operator(name)) is not None:
                private.handlers().setdefault(op, handler)  # another's handler stays


def _is_chosen(words: Sequence[str], only: Sequence[str], exclude: Sequence[str]) -> bool:
    return _matches(words, only) and not _matches(words, exclude)


def _matches(words: Sequence[str], patterns: Sequence[str]) -> bool:
    """Whether a pattern fits one of the words: operators with their overload or without, also as report() has them."""
    names = {*words, *(word.partition(".")[0] for word in words)}
    return any(fnmatch.filter(names, pattern.removeprefix("aten.")) for pattern in patterns)


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


def _replicate_plain(torch_way: Callable[..., Any]) -> Callable[..., Any]:
    """Plain integer and bool tensors are indices and masks: the same on every rank."""

    def replicate(op: Any, tensor: torch.Tensor, mesh: Any) -> Any:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or isinstance(tensor, DTensor):
            return torch_way(op, tensor, mesh)
        placements = [private.REPLICATE] * mesh.ndim
        return private.make_spec(mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)

    return replicate
