"""Batch arithmetic: derive every batch size from a few others, without rounding; suggest sizes that fit.

Three products hold at once; sizes left out are derived from them:

    global_batch = prompts x rollouts_per_prompt
    global_batch = mini_batches x mini_batch
    mini_batch   = micro_batch x accumulation x data_parallel

Supervised training has one rollout per prompt and one mini batch:
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
    "global_batch": "samples per iteration, over all ranks",
    "prompts": "prompts per iteration, over all ranks",
    "rollouts_per_prompt": "samples generated from each prompt",
    "mini_batches": "optimizer steps in one pass over the global batch",
    "mini_batch": "samples per optimizer step, over all ranks",
    "micro_batch": "samples in one forward pass of one data-parallel rank",
    "accumulation": "forward passes before an optimizer step",
    "data_parallel": "ranks that process different samples",
}
# Sizes that default to 1, in this order, if the products do not determine them.
_USUAL = ("rollouts_per_prompt", "mini_batches")
_OF_ROLLOUTS = ("prompts", "rollouts_per_prompt", "mini_batches", "mini_batch")
_TRIES = 1000  # values of one size tried in each direction, to suggest a fix in an error


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """All batch sizes of a training loop; every product above holds."""

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
        """Samples per iteration on one data-parallel rank."""
        return self.global_batch // self.data_parallel

    @property
    def rank_mini_batch(self) -> int:
        """Samples per optimizer step on one data-parallel rank."""
        return self.mini_batch // self.data_parallel

    @property
    def updates(self) -> int:
        """Optimizer steps per iteration."""
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
) -> BatchSizes:
    """Derive all batch sizes; sizes that follow from the others may be left out.

    Never rounds: raises InvalidArgument with the conflicting numbers and the nearest valid sizes, or with
    the names of the sizes of which one more is needed.
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
    known = {name: _whole(name, size) for name, size in given.items() if size is not None}
    update_epochs = _whole("update_epochs", update_epochs)
    try:
        sizes = _derive(known)
    except _SizeConflict as conflict:
        raise InvalidArgument(f"{conflict}{_origin(known, conflict)}{_suggestions(known, conflict)}") from None
    unknown = [name for name in given if name not in sizes and not (_is_supervised(known) and name in _OF_ROLLOUTS)]
    if unknown:
        options = "; ".join(f"{name} ({_MEANINGS[name]})" for name in unknown)
        raise InvalidArgument(f"{_listed(known) or 'no size'} does not determine all batch sizes: add one of {options}")
    return BatchSizes(**sizes, update_epochs=update_epochs)


class _SizeConflict(Exception):
    """A product that does not hold, with the name of its result."""

    def __init__(self, whole: str, message: str, *, full: bool) -> None:
        super().__init__(message)
        self.whole = whole
        self.full = full  # every size of the product is known, so that one of them is redundant


def _derive(given: Mapping[str, int]) -> dict[str, int]:
    """Return all sizes that follow from the given ones; raises _SizeConflict if they contradict each other."""
    sizes = dict(given)
    # Without rollout sizes there is one mini batch: an extra factor is an error, not a second mini batch.
    products = _SUPERVISED if _is_supervised(given) else _ROLLOUTS
    _solve(sizes, products)
    for name in _USUAL:
        if name not in sizes:
            sizes[name] = 1
            _solve(sizes, products)
    _solve(sizes, _ROLLOUTS)
    return sizes


def _is_supervised(given: Mapping[str, int]) -> bool:
    return not any(name in given for name in _OF_ROLLOUTS)


def _whole(name: str, size: object) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidArgument(f"{name}={size!r} must be an integer of at least 1")
    return size


def _solve(sizes: dict[str, int], products: tuple[Product, ...]) -> None:
    """Fill in every size that a product determines, until no more follow; check complete products."""
    progressed = True
    while progressed:
        progressed = False
        for whole, parts in products:
            names = (whole, *parts)
            unknown = [name for name in names if name not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = _missing_size(sizes, whole, parts, unknown[0])
                progressed = True
            elif not unknown:
                _check(sizes, whole, parts)


def _missing_size(sizes: Mapping[str, int], whole: str, parts: tuple[str, ...], unknown: str) -> int:
    known = [part for part in parts if part in sizes]
    product = math.prod(sizes[part] for part in known)
    if unknown == whole:
        return product
    quotient, rest = divmod(sizes[whole], product)
    if rest or not quotient:
        message = f"{whole}={sizes[whole]} is not a multiple of {_spelled(sizes, known)}"
        raise _SizeConflict(whole, message, full=False)
    return quotient


def _check(sizes: Mapping[str, int], whole: str, parts: tuple[str, ...]) -> None:
    if math.prod(sizes[part] for part in parts) != sizes[whole]:
        raise _SizeConflict(whole, f"{whole}={sizes[whole]} is not {_spelled(sizes, parts)}", full=True)


def _spelled(sizes: Mapping[str, int], names: tuple[str, ...] | list[str]) -> str:
    """Spell out a product: "micro_batch x data_parallel = 2 x 4 = 8"."""
    if len(names) == 1:
        return f"{names[0]}={sizes[names[0]]}"
    numbers = " x ".join(str(sizes[name]) for name in names)
    return f"{' x '.join(names)} = {numbers} = {math.prod(sizes[name] for name in names)}"


def _listed(given: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in given.items())


def _origin(given: Mapping[str, int], conflict: _SizeConflict) -> str:
    """Return where a derived size comes from; "" for a given size."""
    return "" if conflict.whole in given else f" (from {_listed(given)})"


def _suggestions(given: Mapping[str, int], conflict: _SizeConflict) -> str:
    """Return the nearest valid values of each given size, with the others unchanged."""
    ways = []
    for name in sorted(given, key=lambda name: name != conflict.whole):
        near = [f"{name}={size}" for size in _nearest(given, name)]
        ways += [" or ".join(near)] if near else []
    if not ways:
        return ": changing a single size does not help; omit one of them"
    first, *others = ways
    last = ", or omit one of them" if conflict.full else ""
    return f": use {first}{''.join(f', or {way}' for way in others)}{last}"


def _nearest(given: Mapping[str, int], name: str) -> list[int]:
    """Return the nearest valid sizes below and above, within a bounded search."""
    grain, size = _grain(given, name), given[name]
    below = range((size - 1) // grain * grain, 0, -grain)[:_TRIES]
    above = range((size // grain + 1) * grain, (size // grain + 1 + _TRIES) * grain, grain)
    nearest = (next((other for other in way if _fits({**given, name: other})), None) for way in (below, above))
    return [other for other in nearest if other is not None]


def _grain(given: Mapping[str, int], name: str) -> int:
    """Return a number that every valid size is a multiple of."""
    step = math.prod(given[part] for part in _STEP if part in given)
    if name == "mini_batch":
        return step
    parts = [given[part] for part in _OF_ROLLOUTS if part in given and part != name]
    if name == "global_batch":
        return math.lcm(step, *parts)
    if name == "prompts" and not {"global_batch", "mini_batches"} & given.keys():
        rollouts = given.get("rollouts_per_prompt", 1)
        whole = math.lcm(step, given.get("mini_batch", 1))
        return whole // math.gcd(whole, rollouts)
    return 1


def _fits(given: Mapping[str, int]) -> bool:
    try:
        _derive(given)
    except _SizeConflict:
        return False
    return True
