"""Random numbers on a CPU mesh (dropout, normal_, multinomial, rrelu): shards draw their own, replicas the same.

Ranks must have the same seed, as torch requires on GPUs too. Each draw takes one number from the rank's generator; a
shard's numbers depend only on that number and on the shard's position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from holdfast.spmd.base.call import USE_TORCH, Call
from holdfast.spmd.base.registry import Rule
from holdfast.spmd.base.torch_modes import own_coordinate
from holdfast.spmd.base.torch_specs import local_of
from holdfast.spmd.sharding.local_parts import local_part, wrap
from holdfast.spmd.sharding.partials import is_partial, overwrite, reduced_placements

PRIME = 0x9E3779B97F4A7C15
LARGEST = 2**63 - 1


def draw(call: Call) -> Any:
    """Run the operator on this rank's shard, with the shard's own random numbers."""
    tensor = call.values[0]
    if call.mesh.device_type != "cpu" or not isinstance(tensor, DTensor):
        return USE_TORCH
    places = reduced_placements(tensor)
    local = local_part(tensor, places, call.mesh) if _reads(call) else local_of(tensor)
    generator = call["generator"] if "generator" in call.names else None
    tensors = {
        slot: local
        if slot == (0,)
        else local_part(torch.ops.aten.expand.default(other, tensor.shape), places, call.mesh)
        for slot, other in call.tensor_args()
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
    """Return True if the result depends on the tensor's values: otherwise a Partial is not reduced."""
    return not call.is_inplace and not call.op._schema.name.endswith("_like")


def multinomial(call: Call) -> Any:
    """Run multinomial: each shard of the rows draws its own; the probabilities of a row are gathered."""
    chances = call.values[0]
    if call.mesh.device_type != "cpu" or not isinstance(chances, DTensor):
        return USE_TORCH
    rows = Shard(0) if chances.ndim == 2 else None
    places: list[Placement] = [place if place == rows else Replicate() for place in chances.placements]
    local = local_part(chances, places, call.mesh)
    if local.numel() or not chances.numel():
        with _own_numbers(_shard_number(call, places), call["generator"]):
            drawn = call.run({(0,): local})
    else:
        with _own_numbers(0, call["generator"]):  # a rank without rows advances its generator too
            drawn = local.new_empty(0, call["num_samples"], dtype=torch.int64)
    return wrap(drawn, call.mesh, places, (*chances.shape[:-1], call["num_samples"]))


def rrelu(call: Call) -> Any:
    """Run rrelu; the random slopes are written into `noise` for the gradient."""
    tensor, noise = call.values[:2]
    if call.mesh.device_type != "cpu" or not isinstance(tensor, DTensor) or not call["training"]:
        return USE_TORCH
    places = reduced_placements(tensor)
    local = local_part(tensor, places, call.mesh)
    slopes = torch.empty_like(local)
    with _own_numbers(_shard_number(call, places), call["generator"]):
        result = call.run({(0,): local, (1,): slopes})
    overwrite(noise, local_part(wrap(slopes, call.mesh, places, tensor.shape), reduced_placements(noise), call.mesh))
    return wrap(result, call.mesh, places, tensor.shape)


def _shard_number(call: Call, places: list[Any]) -> int:
    coordinate = own_coordinate(call.mesh)
    number = 0
    for axis, place in enumerate(places):
        if not place.is_replicate():
            number = number * call.mesh.size(axis) + coordinate[axis]
    return number


class _own_numbers:  # noqa: N801 - used as a function
    """Within the block the generator gives the numbers of one shard; afterwards it is one draw further."""

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
    Rule("random", ("multinomial.default",), "rows", SAME, multinomial),
    Rule("random", ("rrelu_with_noise.default",), "every dim", SAME, rrelu),
]
