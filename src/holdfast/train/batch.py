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
_TRIES = 1000  # how many values of one size are tried, each way, for an error's advice


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
    told = {name: _whole(name, size) for name, size in given.items() if size is not None}
    update_epochs = _whole("update_epochs", update_epochs)
    try:
        sizes = _derived(told)
    except _Misfit as misfit:
        raise InvalidArgument(f"{misfit}{_source(told, misfit)}{_ways_out(told, misfit)}") from None
    open_sizes = [name for name in given if name not in sizes and not (_is_supervised(told) and name in _OF_ROLLOUTS)]
    if open_sizes:
        options = "; ".join(f"{name} ({_MEANINGS[name]})" for name in open_sizes)
        raise InvalidArgument(f"{_listed(told) or 'no size'} leaves batch sizes open: give one more of {options}")
    return Batches(**sizes, update_epochs=update_epochs)


class _Misfit(Exception):
    """A product that does not hold: what it is of, and the words for it."""

    def __init__(self, whole: str, words: str, *, full: bool) -> None:
        super().__init__(words)
        self.whole = whole
        self.full = full  # every size of the product is known: one of them is too many


def _derived(given: Mapping[str, int]) -> dict[str, int]:
    """All sizes that follow from those that are given; raises _Misfit for those that cannot all be."""
    sizes = dict(given)
    # A loop that names no size of rollouts has one mini batch: a factor too many is a mistake there, not a second one.
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
        words = f"{whole}={sizes[whole]} is not a multiple of {_spelled(sizes, known)}"
        raise _Misfit(whole, words, full=False)
    return quotient


def _check(sizes: Mapping[str, int], whole: str, parts: tuple[str, ...]) -> None:
    if math.prod(sizes[part] for part in parts) != sizes[whole]:
        raise _Misfit(whole, f"{whole}={sizes[whole]} is not {_spelled(sizes, parts)}", full=True)


def _spelled(sizes: Mapping[str, int], names: tuple[str, ...] | list[str]) -> str:
    """A product as a reader would check it: "micro_batch x data_parallel = 2 x 4 = 8"."""
    if len(names) == 1:
        return f"{names[0]}={sizes[names[0]]}"
    numbers = " x ".join(str(sizes[name]) for name in names)
    return f"{' x '.join(names)} = {numbers} = {math.prod(sizes[name] for name in names)}"


def _listed(given: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in given.items())


def _source(given: Mapping[str, int], misfit: _Misfit) -> str:
    """Where a size that nobody gave comes from."""
    return "" if misfit.whole in given else f" (from {_listed(given)})"


def _ways_out(given: Mapping[str, int], misfit: _Misfit) -> str:
    """The nearest values of each given size, the others as they are, with which everything would fit."""
    ways = []
    for name in sorted(given, key=lambda name: name != misfit.whole):
        near = [f"{name}={size}" for size in _nearest(given, name)]
        ways += [" or ".join(near)] if near else []
    if not ways:
        return ": no change of one size alone makes all of them fit; leave one of them out"
    first, *others = ways
    last = ", or leave one of them out" if misfit.full else ""
    return f": take {first}{''.join(f', or else {way}' for way in others)}{last}"


def _nearest(given: Mapping[str, int], name: str) -> list[int]:
    """The nearest sizes below and above that fit, as far as a search of reasonable length finds them."""
    grain, size = _grain(given, name), given[name]
    below = range((size - 1) // grain * grain, 0, -grain)[:_TRIES]
    above = range((size // grain + 1) * grain, (size // grain + 1 + _TRIES) * grain, grain)
    found = (next((other for other in way if _fits({**given, name: other})), None) for way in (below, above))
    return [other for other in found if other is not None]


def _grain(given: Mapping[str, int], name: str) -> int:
    """What a size that fits is a multiple of, by the sizes that divide it."""
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
        _derived(given)
    except _Misfit:
        return False
    return True
