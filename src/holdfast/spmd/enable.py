"""`enable` and `disable`: install and remove rules chosen by pattern, handlers, patches; the state INSTALLED."""

from __future__ import annotations

import fnmatch
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from holdfast.spmd.base import torch_dispatch, torch_specs, torch_versions
from holdfast.spmd.base.compiled_code import use_own_code, use_torch_code
from holdfast.spmd.base.private_names import mismatches
from holdfast.spmd.base.registry import Rule, all_rules
from holdfast.spmd.base.spmd_errors import SpmdArgumentError, warn
from holdfast.spmd.base.torch_decisions import allow_empty_shards
from holdfast.spmd.base.torch_dispatch import in_loss_parallel
from holdfast.spmd.base.torch_modes import keep_out_of_dynamo
from holdfast.spmd.base.torch_specs import make_spec
from holdfast.spmd.dispatch.route import Installed, make_route
from holdfast.spmd.patches.functions import install_functions
from holdfast.spmd.patches.loss_parallel import loss_handlers
from holdfast.spmd.patches.methods import METHODS, install_methods, remove_methods
from holdfast.spmd.rules.scan.cumsum_gradient import flip_in_gradient
from holdfast.spmd.sharding.gather_fallback import GATHERED
from holdfast.spmd.sharding.gathered_views import GatheredView
from holdfast.spmd.sharding.index_checks import LOOKUPS
from holdfast.spmd.sharding.live_views import MarkStale, ignore_writes, mark_all_stale, watch_writes
from holdfast.spmd.sharding.plain_tensors import (
    INDEXING,
    MASKING,
    SAMPLING,
    UNSCALING,
    accept_gradients,
    accept_in_gradient,
    accept_masks,
    accept_plain,
    accept_samples,
)

INSTALLED = Installed()
# Handlers for the dispatcher's own table.
HANDLERS = (
    flip_in_gradient,
    accept_in_gradient,
    accept_gradients,
    accept_masks,
    accept_plain,
    accept_samples,
)
# The end of an operator's name that tells forward and gradient apart: `nll_loss_forward`, `embedding_dense_backward`.
_GRADIENT = re.compile(r"_forward\b|(_dense)?_backward(_data)?\b")
# Names for `only` and `exclude` besides families and operators.
GROUPS = ("fallback", "functions", "loss_parallel", "methods", "plain")


def enable(only: Sequence[str] = ("*",), exclude: Sequence[str] = (), check_indices: bool = False) -> list[str]:
    """Give DTensor the rules that torch lacks or gets wrong; return what does not fit this torch, and why.

    `only` and `exclude` are patterns over families ("indexing") and operators ("mse_loss.default"). An operator
    includes its gradient: a loss and a gradient of different rules would fit neither. "fallback" is the gathering of
    calls that torch refuses. A later call replaces the choice. Raises SpmdArgumentError, and leaves the choice
    unchanged, for a pattern that matches nothing and for a choice that leaves nothing.

    With `check_indices` an index out of range in a sharded index tensor raises on every rank, at the cost of two
    numbers sent in each such lookup. Without it only the ranks that hold the index raise, as with torch alone.
    """
    _check("only", only)
    _check("exclude", exclude)
    _check_choice(only, exclude)
    if not isinstance(check_indices, bool):
        raise SpmdArgumentError(f"check_indices={check_indices!r}: give True or False")
    problem = torch_versions.unsupported_reason()
    if problem is None and in_loss_parallel():
        raise SpmdArgumentError(
            "enable() within loss_parallel(): call enable() first, since loss_parallel restores what it found"
        )
    _remove()
    if problem is not None:
        warn(f"holdfast.spmd.enable: {problem}")
        INSTALLED.left_out = [(name, rule.family, problem) for rule in all_rules() for name in rule.operators]
        return _left_out()
    INSTALLED.is_on = True
    mismatched = mismatches()
    for group, problems in mismatched.items():
        why = f"torch {torch.__version__} is not as expected: {'; '.join(problems)}"
        INSTALLED.left_out.append((group, group, why))
    if mismatched:
        warn(f"holdfast.spmd.enable: {'; '.join(_left_out())}")
    try:
        _install(only, [*exclude, *mismatched], check_indices)
    except BaseException:
        disable()
        raise
    return _left_out()


def _install(only: Sequence[str], exclude: Sequence[str], check_indices: bool) -> None:
    for rule in all_rules():
        for name in rule.operators:
            _add(rule, name, only, exclude)
    left_out = {name for name, _, _ in INSTALLED.left_out}
    for group in GROUPS:
        if group not in left_out and not _is_chosen((group,), only, exclude):
            INSTALLED.not_chosen.append((group, group))
    INSTALLED.fallback = _is_chosen(("fallback",), only, exclude)
    if check_indices or _is_chosen(("indexing",), only, exclude):
        INSTALLED.lookups = frozenset(filter(None, map(torch_dispatch.operator, LOOKUPS)))
    INSTALLED.check_indices = check_indices
    slow_path = make_route(INSTALLED, getattr(torch_dispatch.dispatcher(), torch_dispatch.SLOW_PATH))
    torch_dispatch.override(torch_dispatch.SLOW_PATH, slow_path)
    INSTALLED.plain = _is_chosen(("plain",), only, exclude)
    if INSTALLED.plain:
        _accept_plain()
        original = getattr(torch_dispatch.dispatcher(), torch_dispatch.REPLICATE_PLAIN)
        torch_dispatch.override(torch_dispatch.REPLICATE_PLAIN, _replicate_plain(original))
    if _is_chosen(("loss", "loss_parallel"), only, exclude):
        INSTALLED.losses = dict(torch_dispatch.loss_parallel_table())
        torch_dispatch.loss_parallel_table().update(loss_handlers(INSTALLED.losses))
    if _is_chosen(("methods",), only, exclude):
        INSTALLED.methods = install_methods()
    if _is_chosen(("functions",), only, exclude):
        INSTALLED.functions = install_functions()
    if INSTALLED.fallback:
        INSTALLED.shardable = allow_empty_shards()
    watch_writes()
    use_own_code(f"{list(only)} {list(exclude)} {check_indices}")
    methods = (getattr(method, "fset", method) for method, _ in METHODS.values())
    for function in (*HANDLERS, *methods, MarkStale.__call__, GatheredView.__torch_dispatch__):
        keep_out_of_dynamo(function)
    if not torch_dispatch.clear_decision_caches() and threading.active_count() > 1:
        warn(
            "holdfast.spmd.enable: other threads may have used DTensors before, and this Python cannot clear their "
            "caches of sharding decisions: call enable() before the first thread starts"
        )


def _check(option: str, patterns: Sequence[str]) -> None:
    """Refuse patterns that would silently select nothing: a string instead of a list, or an unknown name."""
    families = {rule.family for rule in all_rules()} | set(GROUPS)
    if isinstance(patterns, str):
        raise SpmdArgumentError(f"{option}={patterns!r}: give a list of patterns, like {option}=[{patterns!r}]")
    if option == "only" and not patterns:
        raise SpmdArgumentError("only=[] chooses nothing: call disable() to turn the rules off")
    names = [*families, *(name for rule in all_rules() for name in rule.operators)]
    for pattern in patterns:
        if not isinstance(pattern, str) or not _matches(names, [pattern]):
            raise SpmdArgumentError(
                f"{option}: {pattern!r} is neither a family nor an operator with a rule: give an operator, "
                f"like 'mse_loss.default', or a family: {', '.join(sorted(families))}"
            )


def _check_choice(only: Sequence[str], exclude: Sequence[str]) -> None:
    """Refuse an `exclude` that leaves nothing of `only`."""
    choices = [(rule.family, name) for rule in all_rules() for name in rule.operators]
    if not any(_is_chosen(names, only, exclude) for names in [*choices, *((group,) for group in GROUPS)]):
        raise SpmdArgumentError(
            f"only={list(only)} and exclude={list(exclude)} choose nothing: call disable() to turn the rules off"
        )


def _left_out() -> list[str]:
    return [f"{name}: {why}" for name, _, why in INSTALLED.left_out]


def disable() -> None:
    """Restore torch exactly as it was."""
    mark_all_stale()  # nothing watches the writes from now on
    _remove()


def _remove() -> None:
    INSTALLED.left_out, INSTALLED.not_chosen = [], []
    if not INSTALLED.is_on:
        return
    torch_dispatch.restore(torch_dispatch.SLOW_PATH)
    torch_dispatch.restore(torch_dispatch.REPLICATE_PLAIN)
    ignore_writes()
    table = torch_dispatch.handlers()
    for op in [op for op, handler in table.items() if handler in HANDLERS]:
        del table[op]
    for op, handler in INSTALLED.displaced.items():
        table[op] = handler
    torch_dispatch.loss_parallel_table().update(INSTALLED.losses)
    remove_methods()
    for stand_in in reversed([*INSTALLED.methods, *INSTALLED.functions, *INSTALLED.shardable]):
        stand_in.remove()
    torch_dispatch.clear_decision_caches()
    use_torch_code()
    INSTALLED.rules, INSTALLED.displaced, INSTALLED.is_on = {}, {}, False
    INSTALLED.methods, INSTALLED.functions, INSTALLED.shardable = [], [], []
    INSTALLED.losses, INSTALLED.lookups, INSTALLED.plain = {}, frozenset(), False
    GATHERED.clear()


def _accept_plain() -> None:
    """Install handlers ahead of the dispatcher's own check, which refuses plain tensors."""
    for names, handler in (
        (INDEXING, accept_plain),
        (MASKING, accept_masks),
        (SAMPLING, accept_samples),
        (UNSCALING, accept_gradients),
    ):
        for name in names:
            if (op := torch_dispatch.operator(name)) is not None:
                torch_dispatch.handlers().setdefault(op, handler)  # a handler of another library stays


def _is_chosen(names: Sequence[str], only: Sequence[str], exclude: Sequence[str]) -> bool:
    return _matches(names, only) and not _matches(names, exclude)


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return True if a pattern matches a name: operators with or without overload, also as report() writes them.

    The gradient of an operator matches as the operator does.
    """
    with_forwards = [*names, *(_GRADIENT.sub("", name) for name in names)]
    all_names = {*with_forwards, *(name.partition(".")[0] for name in with_forwards)}
    return any(fnmatch.filter(all_names, pattern.removeprefix("aten.")) for pattern in patterns)


def _add(rule: Rule, name: str, only: Sequence[str], exclude: Sequence[str]) -> None:
    op = torch_dispatch.operator(name)
    if not _is_chosen((rule.family, name), only, exclude):
        INSTALLED.not_chosen.append((name, rule.family))
    elif op is None:
        INSTALLED.left_out.append((name, rule.family, f"torch {torch.__version__} has no such operator"))
    else:
        INSTALLED.rules[op] = rule
        table = torch_dispatch.handlers()
        if op in table:  # torch's own handler would run before the rule
            INSTALLED.displaced[op] = table.pop(op)


def _replicate_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    """Treat plain integer and bool tensors as replicas: they are indices and masks, equal on every rank."""

    def replicate(op: Any, tensor: torch.Tensor, mesh: Any) -> Any:
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or isinstance(tensor, DTensor):
            return original(op, tensor, mesh)
        placements = [torch_specs.REPLICATE] * mesh.ndim
        return make_spec(mesh, placements, tensor.shape, tensor.stride(), tensor.dtype)

    return replicate
