"""In-place calls on a Partial (add_, mul_, fill_ ...): run on the reduced tensor, and written back as a Partial."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from holdfast.spmd.base.call import USE_TORCH, Call, apply
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_modes import simulates_ranks
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.partials import is_first, is_partial, overwrite, own_share, reduced_placements

ADDING = ("add_", "sub_")
SCALING = ("mul_", "div_")
FILLING = ("fill_",)  # the old values do not matter


def on_partial(call: Call) -> Any:
    """Reduce the written tensor, run the call on it, and write the result back."""
    written = call.values[0]
    if not is_partial(written):
        return USE_TORCH
    name = call.op._schema.name.removeprefix("aten::")
    others = [tensor for slot, tensor in call.tensor_args() if slot != (0,)]
    if name in SCALING and not any(isinstance(other, DTensor) for other in others):
        return USE_TORCH
    if name in ADDING and others and all(_is_partial_alike(written, other) for other in others):
        return USE_TORCH
    if name in ADDING and _adds_whole(written, call.values[1]):
        return _add_once(call)
    if name == "masked_fill_" and _is_whole(written, call["mask"]) and not isinstance(call["value"], torch.Tensor):
        value = own_share(written, local_of(written).new_tensor(call["value"]))
        local_of(written).masked_fill_(_local(call["mask"]), value)
        return written
    rest = [_reduced(value) for value in call.values[1:]]
    places = reduced_placements(written)
    everything = local_of(written) if name in FILLING else local_part(written, places, call.mesh)
    copy = wrap(everything.clone(), call.mesh, places, written.shape)
    apply(call.op, [copy, *rest])
    overwrite(written, local_of(copy))
    return written


def _adds_whole(written: DTensor, other: Any) -> bool:
    """Return True if the addend is a scalar, or replicated where the tensor is Partial and else placed alike."""
    kinds = {place.reduce_op for place in written.placements if isinstance(place, Partial)}
    if not kinds <= {"sum", "avg"} or (simulates_ranks() and "sum" in kinds):
        return False  # no simulated rank is the first, which would add it
    return _is_whole(written, other) if isinstance(other, DTensor) else not isinstance(other, torch.Tensor)


def _is_whole(written: DTensor, other: Any) -> bool:
    """Return True for a DTensor of the same shape that is replicated where `written` is Partial, and else alike."""
    same = isinstance(other, DTensor) and other.device_mesh == written.device_mesh and other.shape == written.shape
    return same and tuple(other.placements) == tuple(reduced_placements(written))


def _local(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _add_once(call: Call) -> Any:
    """Add a replicated value on the first rank of each summed axis, and on all ranks of an averaged one."""
    written, other = call.values[:2]
    places = enumerate(written.placements)
    axes = [axis for axis, place in places if isinstance(place, Partial) and place.reduce_op == "sum"]
    if all(is_first(written, axis) for axis in axes):
        apply(call.op, [local_of(written), _local(other), *call.values[2:]])
    return written


def _reduced(value: Any) -> Any:
    """Return the tensor with its Partial axes replicated, as the written tensor's are."""
    if not is_partial(value):
        return value
    places = reduced_placements(value)
    return wrap(local_part(value, places, value.device_mesh), value.device_mesh, places, value.shape)


def _is_partial_alike(written: DTensor, other: torch.Tensor) -> bool:
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
        "every dim; a Partial is reduced, and stays one, unless the call is linear",
        "torch applies the call to each rank's part, so that a scalar is added once per rank",
        on_partial,
    ),
]
