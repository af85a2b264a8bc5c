"""Random numbers on a CPU mesh: every shard draws its own, every replica the same.

Ranks must have the same seed, as torch asks on GPUs too. Each draw takes one number from the rank's generator, and
a shard's numbers depend on that number and on the shard's place alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base import torch_private as private
from holdfast.spmd.base.call import LEAVE, Call, moved, wrap
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.sharding.partials import is_partial, overwrite, reduced_places

PRIME = 0x9E3779B97F4A7C15
LARGEST = 2**63 - 1


def draw(call: Call) -> Any:
    """Run the operator on this rank's shard, with numbers that are the shard's own."""
    tensor = call.values[0]
    if call.mesh.device_type != "cpu" or not isinstance(tensor, DTensor):
        return LEAVE
    places = reduced_places(tensor)
    local = moved(tensor, places, call.mesh) if _reads(call) else private.local_of(tensor)
    generator = call["generator"] if "generator" in call.names else None
    tensors = {
        spot: local if spot == (0,) else moved(torch.ops.aten.expand.default(other, tensor.shape), places, call.mesh)
        for spot, other in call.spots()
    }
    with _own_numbers(_shard_number(call, places), generator):
        result = call.run(tensors)
    if call.is_inplace:
        if is_partial(tensor):
            overwrite(tensor, local)
        return tensor
    if isinstance(result, torch.Tensor):
        return wrap(result, call.mesh, places, tensor.shape)
    return tuple(wrap(item, call.mesh, places, tensor.shape) for item in result)


def _reads(call: Call) -> bool:
    """Whether the numbers drawn depend on the tensor's values: a sum whose values are not read is not reduced."""
    return not call.is_inplace and not call.op._schema.name.endswith("_like")


def choose(call: Call) -> Any:
    """multinomial: each shard of the rows draws its own; the chances of a row come to one place."""
    chances = call.values[0]
    if call.mesh.device_type != "cpu" or not isinstance(chances, DTensor):
        return LEAVE
    rows = Shard(0) if chances.ndim == 2 else None
    places: list[Placement] = [place if place == rows else Replicate() for place in chances.placements]
    local = moved(chances, places, call.mesh)
    if local.numel() or not chances.numel():
        with _own_numbers(_shard_number(call, places), call["generator"]):
            drawn = call.run({(0,): local})
    else:
        with _own_numbers(0, call["generator"]):  # a rank without rows goes on as the others do
            drawn = local.new_empty(0, call["num_samples"], dtype=torch.int64)
    return wrap(drawn, call.mesh, places, (*chances.shape[:-1], call["num_samples"]))


def leak(call: Call) -> Any:
    """rrelu: the slopes that are drawn are written into `noise`, for the gradient."""
    tensor, noise = call.values[:2]
    if call.mesh.device_type != "cpu" or not isinstance(tensor, DTensor) or not call["training"]:
        return LEAVE
    places = reduced_places(tensor)
    local = moved(tensor, places, call.mesh)
    slopes = torch.empty_like(local)
    with _own_numbers(_shard_number(call, places), call["generator"]):
        result = call.run({(0,): local, (1,): slopes})
    overwrite(noise, moved(wrap(slopes, call.mesh, places, tensor.shape), reduced_places(noise), call.mesh))
    return wrap(result, call.mesh, places, tensor.shape)


def _shard_number(call: Call, places: list[Any]) -> int:
    coordinate = private.own_coordinate(call.mesh)
    number = 0
    for axis, place in enumerate(places):
        if not place.is_replicate():
            number = number * call.mesh.size(axis) + coordinate[axis]
    return number


class _own_numbers:  # noqa: N801 - used as a function
    """Within a block the generator gives the numbers of one shard; then it goes on where it was, one draw further."""

    def __init__(self, shard: int, generator: torch.Generator | None):
        self._shard = shard
        self._generator = torch.default_generator if generator is None else generator

    def __enter__(self) -> None:
        base = int(torch.randint(LARGEST, (), generator=self._generator))
        self._state = self._generator.get_state()
        self._generator.manual_seed((base + self._shard * PRIME) % LARGEST)

    def __exit__(self, *_: object) -> None:
        self._generator.set_state(self._state)


SAME = "torch draws the same numbers in every shard on a CPU mesh"
RULES = [
    Rule(
        "random",
        (
            *("rand_like.default", "randn_like.default", "randint_like.default", "randint_like.low_dtype"),
            *("native_dropout.default", "bernoulli.default", "bernoulli.p", "bernoulli_.float", "bernoulli_.Tensor"),
            *("normal_.default", "uniform_.default", "exponential_.default", "random_.default", "random_.from"),
            *("random_.to", "poisson.default", "geometric_.default", "log_normal_.default", "cauchy_.default"),
        ),
        "every dim",
        f"{SAME}, or has no strategy",
        draw,
    ),
    Rule("random", ("multinomial.default",), "rows", SAME, choose),
    Rule("random", ("rrelu_with_noise.default",), "every dim", SAME, leak),
]
