"""The modules that an adapter's config names, but for which its file has no tensors: PEFT leaves them untrained."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from holdfast.merging.lora.adapter_config import LoraConfig
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

_SHOWN = 3
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")


def missing_modules(
    config: LoraConfig,
    tensors: Mapping[str, Recipe[Place]],
    adapted: Collection[str],
    whole: Collection[str],
    spelled: Callable[[str], str],
) -> Iterator[str]:
    """Yield what an adapter lacks: matrices of modules of the base, and tensors of modules that are saved whole.

    `adapted` are the modules with matrices, `whole` the keys of whole tensors, as the base spells them. A module that
    differs from an adapted one only in the number of its layer is expected. Another one is expected if no adapted
    module has its name: an adapter of a text model has no matrices for a vision tower.
    """
    alike = {_NUMBER.sub("#", module) for module in adapted}
    used = {target for module in adapted for target in config.targets_of(module, spelled)}
    lacking = []
    for key, recipe in tensors.items():
        module = key.removesuffix(".weight")
        if len(recipe.shape) != 2 or module == key or module in adapted:
            continue
        targets = config.targets_of(module, spelled)
        if targets and (_NUMBER.sub("#", module) in alike or not used.intersection(targets)):
            lacking.append(module)
    if lacking:
        yield f"target_modules has {_listed(lacking)}, for which the adapter has no matrices: it is incomplete"
    unsaved = [key for key in tensors if key not in whole and config.saves(key, spelled)]
    if unsaved:
        yield f"modules_to_save has {_listed(unsaved)}, for which the adapter has no tensor: it is incomplete"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
