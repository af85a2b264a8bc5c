"""Flows, the rules of plans: how each kind of operator may work on shards along one axis without communication.

A flow names for each tensor of a call its sharded dim, or WHOLE; a result may also be PARTIAL. The flow in which every
tensor is whole always exists, and is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.spmd.autoplan.units import PARTIAL, WHOLE

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpFlow:
    """The sharded dim of every input and of every output."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpCall:
    """A call of an operator on full tensors: its arguments, and the shapes of inputs and outputs."""

    arguments: tuple[Any, ...]
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]


def flows_of(name: str, tags: Sequence[Any], call: OpCall) -> tuple[OpFlow, ...]:
    """Return the flows of a call; none for an unknown operator, whose tensors have to be whole."""
    rule = RULES.get(name)
    if rule is None and torch.Tag.pointwise in tags:
        rule = _pointwise
    return tuple(rule(call)) if rule is not None and call.inputs and call.outputs else ()


def _pointwise(call: OpCall) -> list[OpFlow]:
    out = call.outputs[0]
    flows = []
    for dim, size in enumerate(out):
        if size == 1:
            continue
        inputs = []
        for shape in call.inputs:
            own = dim - len(out) + len(shape)
            inputs.append(own if own >= 0 and shape[own] == size else WHOLE)
        if any(place >= 0 for place in inputs):
            flows.append(OpFlow(tuple(inputs), (dim,) * len(call.outputs)))
    return flows


def _view(call: OpCall) -> list[OpFlow]:
    """Keep a dim sharded if it is the leading one of the dims that it is merged with or split into."""
    before, after = call.inputs[0], call.outputs[0]
    flows: list[OpFlow] = []
    left = right = 0
    while left < len(before) and right < len(after):
        begin, end = left, right
        have, want = before[left], after[right]
        left, right = left + 1, right + 1
        while have != want:
            if have < want and left < len(before):
                have, left = have * before[left], left + 1
            elif want < have and right < len(after):
                want, right = want * after[right], right + 1
            else:
                return flows
        source = next((dim for dim in range(begin, left) if before[dim] > 1), None)
        target = next((dim for dim in range(end, right) if after[dim] > 1), None)
        if source is not None and target is not None:
            flows.append(OpFlow((source,), (target,)))
    return flows


def _permute(call: OpCall) -> list[OpFlow]:
    order = [dim % len(call.inputs[0]) for dim in call.arguments[1]]
    return [OpFlow((source,), (target,)) for target, source in enumerate(order)]


def _transpose(call: OpCall) -> list[OpFlow]:
    dims = len(call.inputs[0])
    first, second = (call.arguments[1] % dims, call.arguments[2] % dims) if len(call.arguments) > 2 else (0, dims - 1)
    swapped = {first: second, second: first}
    return [OpFlow((dim,), (swapped.get(dim, dim),)) for dim in range(dims)]


def _except(position: int, default: int | None = 0) -> Callable[[OpCall], list[OpFlow]]:
    """Return a rule for every dim but those that the argument at `position` names."""

    def rule(call: OpCall) -> list[OpFlow]:
        dims = len(call.inputs[0])
        named_dims = call.arguments[position] if len(call.arguments) > position else default
        named = {dim % dims for dim in ([named_dims] if isinstance(named_dims, int) else named_dims or range(dims))}
        flows = []
        for dim in range(dims):
            if dim not in named:
                lost = sum(other < dim for other in named)
                places = tuple(dim if len(shape) == dims else dim - lost for shape in call.outputs)
                flows.append(OpFlow((dim,) * len(call.inputs), places))
        return flows

    return rule


def _sum(call: OpCall) -> list[OpFlow]:
    dims = len(call.inputs[0])
    named_dims = call.arguments[1] if len(call.arguments) > 1 else None
    named = {dim % dims for dim in (named_dims or range(dims))}
    kept = _except(1)(OpCall((None, tuple(named)), call.inputs, call.outputs))
    return [*kept, *(OpFlow((dim,), (PARTIAL,)) for dim in named)]


def _stack(call: OpCall) -> list[OpFlow]:
    dims = len(call.inputs[0])
    at = (call.arguments[1] if len(call.arguments) > 1 else 0) % (dims + 1)
    return [OpFlow((dim,) * len(call.inputs), (dim + (dim >= at),)) for dim in range(dims)]


def _product(letters: str) -> Callable[[OpCall], list[OpFlow]]:
    """Return a rule for matrix products by letters, as in "ik,kj->ij": a letter that the result lacks is summed."""
    words, _, out = letters.partition("->")

    def rule(call: OpCall) -> list[OpFlow]:
        inputs = words.split(",")[-len(call.inputs) :] if len(call.inputs) < len(words.split(",")) else words.split(",")
        flows = []
        for letter in sorted(set("".join(inputs))):
            places = tuple(word.find(letter) for word in inputs)  # find returns WHOLE if the letter is missing
            summed = letter not in out
            if summed and len(inputs) > 2:
                continue  # the addend would be added by every rank
            flows.append(OpFlow(places, (PARTIAL if summed else out.index(letter),)))
        return flows

    return rule


def _linear(call: OpCall) -> list[OpFlow]:
    x = call.inputs[0]
    has_bias = len(call.inputs) > 2
    last = len(x) - 1
    tail = (WHOLE,) if has_bias else ()
    flows = [OpFlow((dim, WHOLE, *tail), (dim,)) for dim in range(last)]
    return [*flows, OpFlow((WHOLE, 0, *((0,) if has_bias else ())), (last,)), OpFlow((last, 1, *tail), (PARTIAL,))]


def _embedding(call: OpCall) -> list[OpFlow]:
    ids = len(call.inputs[1])
    flows = [OpFlow((WHOLE, dim), (dim,)) for dim in range(ids)]
    return [*flows, OpFlow((1, WHOLE), (ids,)), OpFlow((0, WHOLE), (PARTIAL,))]


def _leading(call: OpCall) -> list[OpFlow]:
    """Shard the leading dims of norms over the last dims, which their weights have."""
    normed = len(call.arguments[1])
    rest = (WHOLE,) * (len(call.inputs) - 1)
    return [OpFlow((dim, *rest), (dim,)) for dim in range(len(call.inputs[0]) - normed)]


def _attention(call: OpCall) -> list[OpFlow]:
    """Shard batch and heads; a mask has to be whole, or to have the dim."""
    flows = []
    for dim in range(len(call.inputs[0]) - 2):
        places = [dim, dim, dim]
        for mask in call.inputs[3:]:
            places.append(dim if len(mask) == len(call.inputs[0]) and mask[dim] > 1 else WHOLE)
        flows.append(OpFlow(tuple(places), (dim,)))
    return flows


def _convolution(call: OpCall) -> list[OpFlow]:
    has_bias, groups = len(call.inputs) > 2, call.arguments[8]
    tail = (WHOLE,) if has_bias else ()
    flows = [OpFlow((0, WHOLE, *tail), (0,))]
    if groups == 1:
        flows.append(OpFlow((WHOLE, 0, *((0,) if has_bias else ())), (1,)))
        flows += [] if has_bias else [OpFlow((1, 1), (PARTIAL,))]
    return flows


def _channels(call: OpCall) -> list[OpFlow]:
    """Shard images and channels, which are independent."""
    return [OpFlow((dim,), (dim,) * len(call.outputs)) for dim in (0, 1)]


def _images(call: OpCall) -> list[OpFlow]:
    rest = (WHOLE,) * (len(call.inputs) - 1)
    return [OpFlow((0, *rest), (0,) * len(call.outputs))]


RULES: dict[str, Callable[[OpCall], list[OpFlow]]] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("_to_copy", "clone", "detach", "alias", "expand", "native_dropout", "zeros_like"), _pointwise),
    **dict.fromkeys(("ones_like", "empty_like", "lift_fresh", "where", "masked_fill"), _pointwise),
    "permute": _permute,
    **dict.fromkeys(("transpose", "t"), _transpose),
    **dict.fromkeys(("slice", "select", "unbind", "_softmax", "_log_softmax", "cumsum", "cat"), _except(1)),
    **dict.fromkeys(("gather", "scatter", "scatter_"), _except(1)),
    **dict.fromkeys(("mean", "amax", "amin", "logsumexp"), _except(1, None)),
    **dict.fromkeys(("split", "split_with_sizes"), _except(2)),
    **dict.fromkeys(("topk",), _except(2, -1)),
    **dict.fromkeys(("sort", "argmax"), _except(1, -1)),
    "sum": _sum,
    "stack": _stack,
    "mm": _product("ik,kj->ij"),
    "bmm": _product("bik,bkj->bij"),
    "addmm": _product("j,ik,kj->ij"),
    "linear": _linear,
    "embedding": _embedding,
    **dict.fromkeys(("rms_norm", "layer_norm"), _leading),
    "scaled_dot_product_attention": _attention,
    "convolution": _convolution,
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "constant_pad_nd"), _channels),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), _channels),
    **dict.fromkeys(("group_norm", "native_group_norm"), _images),
}
