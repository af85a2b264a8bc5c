"""The modules that an adapter's config names, but for which its file has no tensors: PEFT leaves them untrained.

A complete adapter is never refused: where it is not certain that PEFT trains a module, nothing is expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.merging.lora.adapter_config import LoraConfig
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

_SHOWN = 3
_NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
_LAYER = re.compile(r"(?:.*?\.)?layers\.([0-9]+)\.")
_PREDICTION = re.compile(r"(?:.*\.)?mtp\..+")  # layers that predict several tokens, which transformers does not open

Spelling = Callable[[str], str]


def missing_modules(
    config: LoraConfig,
    model: Mapping[str, Any],
    tensors: Mapping[str, Recipe[Place]],
    adapted: Collection[str],
    whole: Collection[str],
    spelled: Spelling,
) -> Iterator[str]:
    """Yield what an adapter lacks: matrices of modules of the base, and tensors of modules that are saved whole.

    `model` is the base's config. `adapted` are the modules with matrices, `whole` the keys of whole tensors, as the
    base spells them. A module that differs from one of the adapter's only in the number of its layer is expected.
    Another one is expected if no module of the adapter has its name in the config: an adapter of a text model has no
    matrices for a vision tower.
    """
    layers = _layer_count(model)
    opened = {key: recipe for key, recipe in tensors.items() if _is_opened(key, layers)}
    saved = _Endings.of(config.saved_modules, spelled, whole_names=False)
    matrices = _MatrixModules(config, saved, spelled)
    modules = [
        key.removesuffix(".weight") for key, r in opened.items() if len(r.shape) == 2 and key.endswith(".weight")
    ]
    lacking = _lacking(modules, frozenset(adapted), matrices.meaning, str)
    if lacking:
        yield f"target_modules has {_listed(lacking)}, for which the adapter has no matrices: it is incomplete"
    unsaved = _lacking(opened, frozenset(whole), lambda key: saved.meaning(_module(key)), _module)
    if unsaved:
        yield f"modules_to_save has {_listed(unsaved)}, for which the adapter has no tensor: it is incomplete"


def _lacking(
    names: Iterable[str], present: frozenset[str], meaning: Callable[[str], list[str]], module: Callable[[str], str]
) -> list[str]:
    """Return the names that the config means, and that must be present."""
    alike = {_NUMBER.sub("#", module(name)) for name in present}
    used = {stated for name in present for stated in meaning(name)}
    found = ((name, meaning(name)) for name in names if name not in present)
    return [
        name
        for name, stated in found
        if stated and (_NUMBER.sub("#", module(name)) in alike or used.isdisjoint(stated))
    ]


def _module(key: str) -> str:
    return key.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class _Endings:
    """Names of a config, by which PEFT means every module with this name or ending.

    `exact` are the names of modules of the base, with the config's. Without `whole_names` an ending may begin within a
    name: modules_to_save of "norm" has "input_layernorm", too.
    """

    names: frozenset[str]
    exact: Mapping[str, str]
    inner: tuple[str, ...]

    @staticmethod
    def of(names: Collection[str], spelled: Spelling, *, whole_names: bool = True) -> _Endings:
        return _Endings(frozenset(names), {spelled(name): name for name in names}, () if whole_names else tuple(names))

    def meaning(self, module: str) -> list[str]:
        """Return the config's names that mean a module of the base."""
        found = [self.exact[module]] if module in self.exact else []
        endings = [module, *(module[match.end() :] for match in re.finditer(r"\.", module))]
        found += [ending for ending in endings if ending in self.names]
        if not found and module.endswith(self.inner):
            found = [name for name in self.inner if module.endswith(name)]
        return found


class _MatrixModules:
    """The modules that a config gives matrices to."""

    def __init__(self, config: LoraConfig, saved: _Endings, spelled: Spelling) -> None:
        self._targets = _Endings.of(config.targets, spelled)
        self._excluded = _Endings.of(config.excluded, spelled)
        self._saved = saved
        self._layers = config.layers
        names = "|".join(map(re.escape, config.layer_names))
        self._number = re.compile(rf"(?:.*?\.)?(?:{names})\.([0-9]+)\." if names else r".*?\.[^.]*\.([0-9]+)\.")

    def meaning(self, module: str) -> list[str]:
        """Return the names in target_modules that mean a module of the base."""
        found = self._targets.meaning(module)
        if not found or self._excluded.meaning(module) or self._saved.meaning(module):
            return []
        if self._layers is not None:
            number = self._number.match(module)
            if number is None or int(number[1]) not in self._layers:
                return []
        return found


def _layer_count(model: Mapping[str, Any]) -> int | None:
    text = model.get("text_config")
    counts = [scope.get("num_hidden_layers") for scope in (model, text) if isinstance(scope, Mapping)]
    return next((count for count in counts if type(count) is int), None)


def _is_opened(key: str, layers: int | None) -> bool:
    """Return False for a tensor of a layer beyond those of the config, as GLM and DeepSeek store one."""
    number = _LAYER.match(key)
    beyond = layers is not None and number is not None and int(number[1]) >= layers
    return not beyond and _PREDICTION.fullmatch(key) is None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
