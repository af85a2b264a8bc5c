"""In-place calls on a Partial: the tensor is reduced where it stands, unless the call is linear."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from holdfast.spmd import torch_private as private
from holdfast.spmd.call import LEAVE, Call, apply, moved, wrap
from holdfast.spmd.fallback import settle_base
from holdfast.spmd.registry import Rule

ADDING = ("add_", "sub_", "add_.Scalar", "sub_.Scalar")
SCALING = ("mul_", "div_")


def settle_first(call: Call) -> Any:
    """Reduce the written tensor in place, then call again."""
    written = call.values[0]
    if not isinstance(written, DTensor) or not any(isinstance(place, Partial) for place in written.placements):
        return LEAVE
    name = call.op._schema.name.removeprefix("aten::")
    others = [tensor for spot, tensor in call.spots() if spot != (0,)]
    if name in SCALING and not any(isinstance(other, DTensor) for other in others):
        return LEAVE
    if name in ADDING and others and all(_same_parts(written, other) for other in others):
        return LEAVE
    places = [Replicate() if isinstance(place, Partial) else place for place in written.placements]
    rest = [_reduced(value) for value in call.values[1:]]  # before the base is: they may be views of it too
    if settle_base(written):
        private.replace_contents(written, private.local_of(written), places)
        return apply(call.op, [written, *rest])
    overwritten = name in ("fill_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_")
    contents = private.local_of(written) if overwritten else moved(written, places, call.mesh).clone()
    private.replace_contents(written, contents, places)
    return apply(call.op, [written, *rest])


def _reduced(value: Any) -> Any:
    """The same on every rank of an axis on which it was Partial, as the written tensor is."""
    if not isinstance(value, DTensor) or not any(isinstance(place, Partial) for place in value.placements):
        return value
    places = [Replicate() if isinstance(place, Partial) else place for place in value.placements]
    return wrap(moved(value, places, value.device_mesh), value.device_mesh, places, value.shape)


def _same_parts(written: DTensor, other: torch.Tensor) -> bool:
    return isinstance(other, DTensor) and tuple(other.placements) == tuple(written.placements)


NAMES = (
    *("add_.Scalar", "add_.Tensor", "sub_.Scalar", "sub_.Tensor", "mul_.Scalar", "mul_.Tensor", "div_.Scalar"),
    *("div_.Tensor", "clamp_.default", "clamp_min_.default", "clamp_max_.default", "clamp_.Tensor", "relu_.default"),
    *("exp_.default", "sin_.default", "cos_.default", "tanh_.default", "sigmoid_.default", "abs_.default"),
    *("sqrt_.default", "rsqrt_.default", "log_.default", "reciprocal_.default", "square_.default", "pow_.Scalar"),
    *("pow_.Tensor", "sign_.default", "floor_.default", "ceil_.default", "round_.default", "masked_fill_.Scalar"),
    *("masked_fill_.Tensor", "addcdiv_.default", "addcmul_.default", "lerp_.Scalar", "lerp_.Tensor", "atan2_.default"),
    *("erf_.default", "expm1_.default", "log1p_.default", "hardtanh_.default", "leaky_relu_.default", "silu_.default"),
    *(
        "fill_.Scalar",
        "fill_.Tensor",
        "gelu_.default",
        "elu_.default",
        "threshold_.default",
        "fmod_.Scalar",
        "remainder_.Scalar",
    ),
)

RULES = [
    Rule(
        "inplace",
        NAMES,
        "every dim; a Partial is reduced in place unless the call is linear",
        "torch applies the call to each rank's part, so that a scalar is added once per rank",
        settle_first,
    ),
]
