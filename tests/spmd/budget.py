"""How many bytes a rank may receive in a case, by what the table declares of the operation.

Shards along a `free` letter send nothing. Along a letter of `reduced` only the named sums or edges are sent. Along any
other letter the rule is to gather: each input that is sharded so once forward and, with gradients, once again for what
autograd kept of it. A Partial is reduced once forward, and twice more for a gradient: formulas use what they kept for
a comparison and for a product, say. `rounds_of` says how often a composite does all that. Where the inputs lie apart
no letter is free: each may have to be brought beside the others.
"""

from __future__ import annotations

import math
import re

from torch.distributed.tensor import Placement, Shard

from tests.spmd.cases import MESHES, Case, placements_of
from tests.spmd.declared import free_of, rounds_of
from tests.spmd.table import SIZES, Input, Operation


def budget(case: Case, operation: Operation) -> int:
    """The bytes that the operation's declaration allows each rank to receive, forward and backward together."""
    ranks = MESHES[case.mesh]
    moved = 0.0
    for given, places in zip(operation.inputs, placements_of(case, operation), strict=True):
        gathered = {letter for letter in given.letters if case.others == "apart" or not _is_free(operation, letter)}
        moved += rounds_of(operation.name) * _brought(operation, given, places or (), case.size, ranks, gathered)
    return math.ceil(moved + _sums(case, operation))


def _is_free(operation: Operation, letter: str) -> bool:
    """Whether shards along a letter stay where they are, but for sums and edges."""
    return letter in operation.free + free_of(operation.name) + "".join(operation.reduced)


def _brought(
    operation: Operation,
    given: Input,
    places: tuple[Placement, ...],
    size: str,
    ranks: tuple[int, ...],
    gathered: set[str],
) -> float:
    """The bytes of gathering or reducing one input wherever the declaration does not let it be."""
    sizes = [SIZES[size][letter] for letter in given.letters]
    cut = {place.dim for place in places if isinstance(place, Shard)}
    entire = [size for dim, size in enumerate(sizes) if dim not in cut]
    order: list[int] = []  # the axes to gather, the last first
    for axis, place in enumerate(places):
        if isinstance(place, Shard):
            sizes[place.dim] = -(-sizes[place.dim] // ranks[axis])
            if given.letters[place.dim] in gathered:
                order.insert(0, axis)
    item = 1 if "bool" in given.kind else 8
    received = 0.0
    for axis in order:
        received += (
            (ranks[axis] - 1) * math.prod(sizes) * _padding(entire, ranks[axis]) * item * (2 if operation.grad else 1)
        )
        sizes[places[axis].dim] *= ranks[axis]  # type: ignore[attr-defined]
    for axis, place in enumerate(places):
        if place.is_partial():
            share = (ranks[axis] - 1) / ranks[axis] * item * (3 if operation.grad else 1)
            received += 2 * share * math.prod(sizes) * _padding(entire, ranks[axis])
    return received


def _padding(sizes: list[int], ranks: int) -> float:
    """How much longer a tensor is when one of its whole dims, whichever costs the most, is padded to be cut evenly.

    Where the ranks exchange shards of one dim for shards of another, CPUs gather padded shards of the other.
    """
    return max((-(-size // ranks) * ranks / size for size in sizes if size >= ranks), default=1.0)


def _sums(case: Case, operation: Operation) -> float:
    """The bytes of the sums and edges that `reduced` names, for each axis that shards such a letter."""
    leader = next(given for given in operation.inputs if not given.is_plain)
    received = 0.0
    for word, ranks in zip(case.first, MESHES[case.mesh], strict=True):
        if word.isdigit() and (what := operation.reduced.get(leader.letters[int(word)])):
            count, letters = re.fullmatch(r"(\d+)(.*)", what).groups()  # type: ignore[union-attr]
            elements = int(count) * math.prod(SIZES[case.size][letter] for letter in letters)
            received += 8 * elements * 2 * (ranks - 1) / ranks
    return received
