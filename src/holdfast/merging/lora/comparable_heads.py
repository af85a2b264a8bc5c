"""A base and a tuned model as tensors of equal keys, whether or not one of them ties its head to the embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.convert.computed import ComputedTensors
from holdfast.merging.lora.stored_values import is_equal
from holdfast.merging.lora.tied_head import tied_head
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ComparablePair:
    """The tensors of both models by key, a tied head included.

    `tied` are the keys of the head and the embeddings of a base that ties them, if the head's is known: PEFT merges a
    product into both, so that they are stored whole. `stays_tied`: the tuned model ties them, too.
    """

    base: Mapping[str, Recipe[Place]]
    tuned: Mapping[str, Recipe[Place]]
    tied: frozenset[str]
    stays_tied: bool


def comparable_heads(
    config: Mapping[str, Any],
    group: Group,
    tuned_config: Mapping[str, Any],
    tuned_group: Group,
    computed: ComputedTensors,
) -> ComparablePair:
    """Return the tensors of both models, with a head for each if one of them has or ties one."""

    def equal(first: Recipe[Place], second: Recipe[Place]) -> bool:
        return is_equal(first, second, computed)

    base_group, base_tie = tied_head(config, group, equal)
    other_group, other_tie = tied_head(tuned_config, tuned_group, equal)
    base, tuned = dict(base_group.tensors), dict(other_group.tensors)
    for tie, tensors in ((base_tie, base), (other_tie, tuned)):
        if tie is not None and tie.head and tie.embedding in tensors:
            tensors[tie.head] = tensors[tie.embedding]
    tied = frozenset((base_tie.head, base_tie.embedding)) if base_tie is not None and base_tie.head else frozenset()
    return ComparablePair(base, tuned, tied, base_tie is not None and other_tie is not None)
