"""Batch arithmetic: every size follows from a few of the others, exactly or not at all.

Three products hold at once; what is left out is what makes them hold:

    global_batch = prompts x rollouts_per_prompt
    global_batch = mini_batches x mini_batch
    mini_batch   = micro_batch x accumulation x data_parallel

Supervised training is the case of one rollout per prompt and one mini batch: there
global_batch = micro_batch x accumulation x data_parallel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument

Product = tuple[str, tuple[str, ...]]
_STEP = ("micro_batch", "accumulation", "data_parallel")
_SUPERVISED: tuple[Product, ...] = (("global_batch", _STEP),)
_ROLLOUTS: tuple[Product, ...] = (
    ("global_batch", ("prompts", "rollouts_per_prompt")),
    ("global_batch", ("mini_batches", "mini_batch")),
    ("mini_batch", _STEP),
)
_MEANINGS = {
    "global_batch": "samples of one iteration, over all ranks",
    "prompts": "prompts of one iteration, over all ranks",
    "rollouts_per_prompt": "samples made from each prompt",
    "mini_batches": "optimizer steps in one pass over the global batch",
    "mini_batch": "samples of one optimizer step, over all ranks",
    "micro_batch": "samples in one forward pass of one data-parallel rank",
    "accumulation": "forward passes before an optimizer step",
    "data_parallel": "ranks that see different samples",
}
# Tried one after the other, only where the products leave a size open: the plain case.
_USUAL = ("rollouts_per_prompt", "mini_batches")
_OF_ROLLOUTS = ("prompts", "rollouts_per_prompt", "mini_batches", "mini_batch")


@dataclass(frozen=True, slots=True)
class Batches:
    """All sizes of a training loop's batches; every product above holds."""

    global_batch: int
    prompts: int
    rollouts_per_prompt: int
    mini_batches: int
    mini_batch: int
    micro_batch: int
    accumulation: int
    data_parallel: int
    update_epochs: int

    @property
    def rank_batch(self) -> int:
        """Samples of one iteration on one data-parallel rank."""
        return self.global_batch // self.data_parallel

    @property
    def rank_mini_batch(self) -> int:
        """Samples of one optimizer step on one data-parallel rank."""
        return self.mini_batch // self.data_parallel

    @property
    def updates(self) -> int:
        """Optimizer steps of one iteration."""
        return self.mini_batches * self.update_epochs


def derive_batches(
    *,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    data_parallel: int | None = None,
    prompts: int | None = None,
    rollouts_per_prompt: int | None = None,
    mini_batch: int | None = None,
    mini_batches: int | None = None,
    update_epochs: int = 1,
) -> Batches:
    """Every batch size from those that are given; what can be derived may be left out.

    Nothing is ever rounded: raises InvalidArgument with both numbers and the nearest that fit,
    or with the names of which one more is needed.
    """
    given = {
        "global_batch": global_batch,
        "prompts": prompts,
        "rollouts_per_prompt": rollouts_per_prompt,
        "mini_batches": mini_batches,
        "mini_batch": mini_batch,
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "data_parallel": data_parallel,
    }
    sizes = {name: _whole(name, size) for name, size in given.items() if size is not None}
    # A loop that names no size of rollouts has one mini batch: a factor too many is a mistake there, not a second one.
    supervised = not any(name in sizes for name in _OF_ROLLOUTS)
    _solve(sizes, _SUPERVISED if supervised else _ROLLOUTS)
    for name in _USUAL:
        if name not in sizes:
            sizes[name] = 1
            _solve(sizes, _SUPERVISED if supervised else _ROLLOUTS)
    _solve(sizes, _ROLLOUTS)
    open_sizes = [name for name in given if name not in sizes and not (supervised and name in _OF_ROLLOUTS)]
    if open_sizes:
        options = "; ".join(f"{name} ({_MEANINGS[name]})" for name in open_sizes)
        told = ", ".join(f"{name}={size}" for name, size in given.items() if size is not None) or "no size"
        raise InvalidArgument(f"{told} leaves batch sizes open: give one more of {options}")
    return Batches(**sizes, update_epochs=_whole("update_epochs", update_epochs))


def _whole(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgument(f"{name}={size!r}: give a whole number from 1 on")
    return size


def _solve(sizes: dict[str, int], products: tuple[Product, ...]) -> None:
    """Fill in every size that some product determines, until nothing more follows; checks what is full."""
    found = True
    while found:
        found = False
        for whole, parts in products:
            names = (whole, *parts)
            unknown = [name for name in names if name not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = _missing(sizes, whole, parts, unknown[0])
                found = True
            elif not unknown:
                _check(sizes, whole, parts)


def _missing(sizes: Mapping[str, int], whole: str, parts: tuple[str, ...], unknown: str) -> int:
    known = [part for part in parts if part in sizes]
    product = math.prod(sizes[part] for part in known)
    if unknown == whole:
        return product
    quotient, rest = divmod(sizes[whole], product)
    if rest or not quotient:
        low, high = quotient * product, (quotient + 1) * product
        nearest = " or ".join(f"{whole}={size}" for size in (low, high) if size)
        raise InvalidArgument(
            f"{whole}={sizes[whole]} is not a multiple of {_spelled(sizes, known)}: "
            f"take {nearest}{_other_ways(sizes, whole, known)}"
        )
    return quotient


def _check(sizes: Mapping[str, int], whole: str, parts: tuple[str, ...]) -> None:
    product = math.prod(sizes[part] for part in parts)
    if product == sizes[whole]:
        return
    ways = [f"{whole}={product}"]
    for part in parts:
        quotient, rest = divmod(sizes[whole] * sizes[part], product)
        if not rest:
            ways.append(f"{part}={quotient}")
    raise InvalidArgument(
        f"{whole}={sizes[whole]} is not {_spelled(sizes, parts)}: take {' or '.join(ways)}, or leave one of them out"
    )


def _spelled(sizes: Mapping[str, int], names: tuple[str, ...] | list[str]) -> str:
    """A product as a reader would check it: "micro_batch x data_parallel = 2 x 4 = 8"."""
    if len(names) == 1:
        return f"{names[0]}={sizes[names[0]]}"
    numbers = " x ".join(str(sizes[name]) for name in names)
    return f"{' x '.join(names)} = {numbers} = {math.prod(sizes[name] for name in names)}"


def _other_ways(sizes: Mapping[str, int], whole: str, known: list[str]) -> str:
    """The nearest values of each factor for which the whole would divide."""
    ways = []
    for name in known:
        others = math.prod(sizes[other] for other in known if other != name)
        if sizes[whole] % others == 0:
            near = _nearest_divisors(sizes[whole] // others, sizes[name])
            ways.append(" or ".join(f"{name}={size}" for size in near))
    return f", or else {', or '.join(ways)}" if ways else ""


def _nearest_divisors(number: int, size: int) -> list[int]:
    """The greatest divisor below `size` and the least above it."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    divisors = sorted({*small, *(number // divisor for divisor in small)})
    below = [divisor for divisor in divisors if divisor < size]
    above = [divisor for divisor in divisors if divisor > size]
    return [*below[-1:], *above[:1]]
