"""The plan of a merge of adapters: for every weight of the base its changes; every tensor of an adapter is used.

Reads headers and configs only. All problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.computed import ComputedTensors
from holdfast.core.errors import Mismatch, Unsupported
from holdfast.core.names import natural_key
from holdfast.merging.lora.adapter import TOKENS, Adapter, ModuleParts
from holdfast.merging.lora.adapter_config import is_module, is_transposed
from holdfast.merging.lora.live_modules import live_modules
from holdfast.merging.lora.missing_modules import missing_modules
from holdfast.merging.lora.stored_values import is_equal
from holdfast.merging.lora.tied_head import EMBEDDINGS, HEADS, IsEqual, change_of_tie, tied_head
from holdfast.merging.lora.weight_changes import (
    BiasChange,
    LowRankChange,
    MergedWeight,
    TokenRowsChange,
    WeightChange,
)
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe

_SHOWN = 8
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_Recipes = dict[str, Recipe[Place]]


@dataclass(slots=True)
class ChangedWeight:
    """A weight of the base: its tensor before the adapters' products, its number of rows, and its changes."""

    base: Recipe[Place]
    rows: int
    changes: list[WeightChange] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LoraPlan:
    """The tensors of the merged model by key. `vocabulary` is the number of rows if tokens were added."""

    tensors: Mapping[str, Recipe[Place]]
    aliases: Mapping[str, str]
    changed: tuple[str, ...]
    vocabulary: int | None
    unties: bool
    notes: tuple[str, ...]
    computed: Mapping[str, MergedWeight]  # the changed weights that are no whole tensors of an adapter


def plan_lora(base: Checkpoint, group: Group, adapters: Sequence[Adapter], computed: ComputedTensors) -> LoraPlan:
    """Match the adapters with the base. Raises one Mismatch that lists all problems."""
    planner = _AdapterMatcher(base, group, lambda first, second: is_equal(first, second, computed))
    for adapter in adapters:
        planner.add(adapter)
    vocabulary = planner.check_vocabulary()
    if planner.problems:
        more = f"\n  and {len(planner.problems) - _SHOWN} more" if len(planner.problems) > _SHOWN else ""
        raise Mismatch("the adapters do not fit the base:\n  " + "\n  ".join(planner.problems[:_SHOWN]) + more)
    tensors = dict(planner.group.tensors)
    merged = {key: _merged(weight) for key, weight in planner.changed.items() if weight.changes}
    for key, weight in planner.changed.items():
        if key not in merged:
            tensors[key] = weight.base
            continue
        recipe = computed.add(key, merged[key])
        tensors[key] = recipe if len(weight.base.shape) == 2 else recipe.squeezed(0)
    changed = tuple(sorted(planner.changed, key=natural_key))
    return LoraPlan(tensors, planner.aliases(), changed, vocabulary, planner.unties, tuple(planner.notes), merged)


def _merged(weight: ChangedWeight) -> MergedWeight:
    if len(weight.base.shape) == 1:
        return MergedWeight(weight.base.unsqueezed(0), 1, tuple(weight.changes))
    return MergedWeight(weight.base, weight.rows, tuple(weight.changes))


class _AdapterMatcher:
    """Matches one adapter after the other with the base."""

    def __init__(self, base: Checkpoint, group: Group, is_equal: IsEqual) -> None:
        self.base = base
        config = base.config() or {}
        self.group, self.tie = tied_head(config, group, is_equal)
        self.changed: dict[str, ChangedWeight] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.unties = False
        self._is_equal = is_equal
        self._model = config
        self._by_key: Callable[[str], str] = str

    def add(self, adapter: Adapter) -> None:
        self._by_key = self._spelling(adapter)
        self._match_tie(adapter)
        adapter.drop_tied_rows(lambda key: self._exists(self._by_key(key)))
        for target, (key, recipe) in adapter.full.items():
            self._replace(adapter, self._by_key(target), key, recipe)
        for module, own in adapter.modules.items():
            self._add_module(adapter, module, own)
        adapted = list(map(self._spelled, adapter.modules))
        whole = list(map(self._by_key, adapter.full))
        for lack in missing_modules(adapter.config, self._model, self.group.tensors, adapted, whole, self._spelled):
            self.problems.append(f"{adapter.path}: {lack}")
        for module in adapter.config.token_indices:
            if self.tie is not None and self._by_key(f"{module}.weight") == self.tie.head:
                continue  # the rows of the embedding, which the head shares
            if not any(is_module(name, module) for name, own in adapter.modules.items() if TOKENS in own.parts):
                self.problems.append(
                    f"{adapter.path} trains rows of {module or 'the embeddings'}, but has no such tensor"
                )

    def _match_tie(self, adapter: Adapter) -> None:
        """Give the head a tensor of its own if the adapter changes one of two tied modules."""
        if self.tie is None:
            return
        try:
            change = change_of_tie(self.tie, adapter, self._by_key, self._is_equal)
        except (Mismatch, Unsupported) as problem:
            self.problems.append(str(problem))
            return
        if change.note:
            self.notes.append(f"{adapter.path}: {change.note}")
        if change.unties:
            shared = self._embeddings()[0]
            self.changed[self.tie.head] = ChangedWeight(shared.base, shared.rows, list(shared.changes))
            self.unties = True
            self.tie = None

    def aliases(self) -> dict[str, str]:
        """Return the aliases of the merged model."""
        tie = self.tie
        return {**self.group.aliases, **({tie.head: tie.embedding} if tie is not None and tie.is_alias else {})}

    def _spelling(self, adapter: Adapter) -> Callable[[str], str]:
        """Return how keys of the adapter become keys of the base.

        The base may lack or add the prefix "model.", and may store the module lm_head as embed_out. For other names
        transformers is asked, where it is installed: it opens old files of vision models under new names.
        """
        wanted = [f"{module}.weight" for module in adapter.modules] + list(adapter.full)
        spellings: tuple[Callable[[str], str], ...] = (
            str,
            lambda key: f"model.{key}",
            lambda key: key.removeprefix("model."),
            lambda key: f"transformer.{key}",
            lambda key: key.removeprefix("transformer."),
        )
        chosen = max(spellings, key=lambda spell: sum(self._exists(spell(key)) for key in wanted))
        heads = [key for key in self.group.tensors if key.endswith(HEADS)]
        heads += [self.tie.head] if self.tie is not None and self.tie.head else []

        def spelled(key: str) -> str:
            found = chosen(key)
            return heads[0] if len(heads) == 1 and found in HEADS and not self._exists(found) else found

        if all(self._exists(spelled(key)) or key.endswith(HEADS) for key in wanted):
            return spelled
        stored = self._stored_keys()
        return lambda key: stored.get(key) or spelled(key)

    def _stored_keys(self) -> dict[str, str]:
        """Return the base's keys by the names of its opened modules, empty if these are not known."""
        try:
            modules = live_modules(self.base.config() or {}, self.group.tensors, self.base.path)
        except Unsupported:
            return {}
        return {name: key for key, name in modules.names.items()}

    def _spelled(self, module: str) -> str:
        return self._by_key(f"{module}.weight").removesuffix(".weight")

    def _exists(self, key: str) -> bool:
        return key in self.group.tensors or key in self.group.aliases or key in self.changed

    def _weight(self, key: str) -> ChangedWeight | None:
        """Return the weight to change, None if the base does not have it."""
        kept = self.group.aliases.get(key, key)
        if kept not in self.changed:
            found = self.group.tensors.get(kept)
            if found is None:
                return None
            self.changed[kept] = ChangedWeight(found, found.shape[0] if found.shape else 0)
        return self.changed[kept]

    def _replace(self, adapter: Adapter, target: str, key: str, recipe: Recipe[Place]) -> None:
        """Put a whole tensor of the adapter (modules_to_save, biases, resized embeddings) in place of the base's."""
        weight = self._weight(target)
        if weight is None and self.tie is not None and target == self.tie.head and len(recipe.shape) == 2:
            self._untie(target, recipe)
            return
        if weight is None:
            self.problems.append(f"{adapter.path}: {key!r}: the base {self.base.path} has no {target!r}")
            return
        if f".{target}".endswith(".shared.weight") and adapter.config.saves(target) and not adapter.config.ties:
            self.problems.append(
                f"{adapter.path}: modules_to_save trains {target} alone, which the base ties to other embeddings: they "
                "keep the base's weight, which its files cannot hold; merge the adapter with PEFT's merge_and_unload"
            )
            return
        if weight.changes:
            self.problems.append(f"{adapter.path}: {key!r} would replace what another adapter changed")
            return
        grows = len(recipe.shape) == 2 and target.endswith((*EMBEDDINGS, *HEADS)) and recipe.shape[0] > weight.rows
        if recipe.shape != weight.base.shape and not (grows and recipe.shape[1] == weight.base.shape[1]):
            self.problems.append(_shapes(adapter, key, recipe, target, weight.base.shape))
            return
        self.changed[self.group.aliases.get(target, target)] = ChangedWeight(
            recipe.cast(weight.base.dtype), recipe.shape[0]
        )

    def _untie(self, target: str, recipe: Recipe[Place]) -> None:
        """Add an output embedding that the base ties to its input embedding."""
        self.unties = True
        self.tie = None
        self.changed[target] = ChangedWeight(recipe.cast(self._embeddings()[0].base.dtype), recipe.shape[0])

    def _add_module(self, adapter: Adapter, module: str, own: ModuleParts) -> None:
        weight = self._weight(self._by_key(f"{module}.weight"))
        keys = ", ".join(map(repr, own.keys.values()))
        if weight is None:
            tied = " (it may be tied to the embeddings: tie_word_embeddings)" if module.endswith("lm_head") else ""
            self.problems.append(f"{adapter.path}: {keys}: the base {self.base.path} has no weight of {module!r}{tied}")
            return
        parts = dict(own.parts)
        try:
            if "lora_embedding_A" in parts or "lora_embedding_B" in parts:
                self._add_product(adapter, module, own, weight, parts, embedding=True)
            if "lora_A.weight" in parts or "lora_B.weight" in parts:
                self._add_product(adapter, module, own, weight, parts, embedding=False)
            if "lora_B.bias" in parts:
                self._add_bias(adapter, module, parts.pop("lora_B.bias"))
            if TOKENS in parts:
                self._add_tokens(adapter, module, own, weight, parts.pop(TOKENS))
        except (Mismatch, Unsupported) as problem:
            self.problems.append(str(problem))
            return
        if parts:
            unused = ", ".join(repr(own.keys[part]) for part in parts)
            self.problems.append(f"{adapter.path}: {unused}: no other tensor or option of the adapter uses it")

    def _add_product(
        self,
        adapter: Adapter,
        module: str,
        own: ModuleParts,
        weight: ChangedWeight,
        parts: _Recipes,
        *,
        embedding: bool,
    ) -> None:
        config = adapter.config
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        missing = [name for name in names if name not in parts]
        if missing:
            raise Mismatch(
                f"{adapter.path}: {module!r} has {', '.join(map(repr, own.keys.values()))}, but no {missing[0]}"
            )
        first, second = parts.pop(names[0]), parts.pop(names[1])
        magnitude = parts.pop(_MAGNITUDE, None) if config.use_dora else None
        transposed = embedding or is_transposed(self._model.get("model_type"), module, config.fan_in_fan_out)
        self._check_product(adapter, module, own, weight, first, second, transposed=transposed)
        outputs = weight.base.shape[1] if transposed else weight.rows
        if config.use_dora and (magnitude is None or magnitude.shape not in ((outputs,), (outputs, 1), (1, outputs))):
            shape = "none" if magnitude is None else list(magnitude.shape)
            raise Mismatch(
                f"{adapter.path}: {module!r}: use_dora needs a lora_magnitude_vector of {outputs}, got {shape}"
            )
        scaling = config.scaling(module, adapter.weight)
        change = LowRankChange(first, second, scaling, transposed, embedding, magnitude, weight.base)
        weight.changes.append(change)

    def _check_product(
        self,
        adapter: Adapter,
        module: str,
        own: ModuleParts,
        weight: ChangedWeight,
        first: Recipe[Place],
        second: Recipe[Place],
        *,
        transposed: bool,
    ) -> None:
        where = f"{adapter.path}: {module!r}"
        if weight.base.dtype.name not in _FLOATS:
            raise Unsupported(f"{where}: the weight is {weight.base.dtype.name}; dequantize the base first")
        if len(weight.base.shape) != 2 or len(first.shape) != 2 or len(second.shape) != 2:
            raise Unsupported(f"{where}: its tensors have {len(first.shape)} dims; Holdfast merges matrices only")
        odd = next((r.dtype.name for r in (first, second) if r.dtype.name not in _FLOATS), None)
        if odd is not None:
            raise Unsupported(f"{where}: a tensor of the adapter is {odd}")
        rank = adapter.config.rank_of(module)
        rows, columns = weight.rows, weight.base.shape[1]
        outputs, inputs = (columns, rows) if transposed else (rows, columns)
        if first.shape != (rank, inputs) or second.shape != (outputs, rank):
            raise Mismatch(
                f"{where}: {', '.join(map(repr, own.keys.values()))} have the shapes {list(first.shape)} and "
                f"{list(second.shape)}, expected {[rank, inputs]} and {[outputs, rank]}: the rank in the config is "
                f"{rank}, and the base's weight is {[rows, columns]}"
            )

    def _add_bias(self, adapter: Adapter, module: str, bias: Recipe[Place]) -> None:
        weight = self._weight(self._by_key(f"{module}.bias"))
        if weight is None or weight.base.shape != bias.shape:
            raise Mismatch(f"{adapter.path}: {module!r} has a lora_B.bias, but the base has no such bias to add it to")
        weight.changes.append(BiasChange(bias.unsqueezed(0), adapter.config.scaling(module, adapter.weight)))

    def _add_tokens(
        self, adapter: Adapter, module: str, own: ModuleParts, weight: ChangedWeight, values: Recipe[Place]
    ) -> None:
        indices = adapter.config.rows_of(module)
        key = own.keys[TOKENS]
        if values.shape != (len(indices), weight.base.shape[1]):
            raise Mismatch(
                f"{adapter.path}: {key!r} has the shape {list(values.shape)}, expected "
                f"{[len(indices), weight.base.shape[1]]}: trainable_token_indices has {len(indices)} rows"
            )
        rows = max((*[index + 1 for index in indices], weight.rows))
        known = set(indices)
        missing = next((row for row in range(weight.rows, rows) if row not in known), None)
        if missing is not None:
            raise Mismatch(
                f"{adapter.path}: {key!r} adds rows to {weight.rows} of the base, but not {missing}: resize the base's "
                "embeddings as for the training first"
            )
        weight.rows = rows
        weight.changes.append(TokenRowsChange(indices, values))

    def _embeddings(self) -> list[ChangedWeight]:
        keys = [key for key in self.group.tensors if key.endswith(EMBEDDINGS)]
        found = [self.changed.get(key) or ChangedWeight(r := self.group.tensors[key], r.shape[0]) for key in keys[:1]]
        if not found:
            raise Mismatch(f"{self.base.path} has no input embeddings among {', '.join(EMBEDDINGS)}")
        return found

    def check_vocabulary(self) -> int | None:
        """Return the new number of rows of the embeddings, None if no token was added."""
        grown = {key: weight.rows for key, weight in self.changed.items() if self._grew(key, weight)}
        if not grown:
            return None
        rows = max(grown.values())
        untied = {key: weight.base for key, weight in self.changed.items() if key not in self.group.tensors}
        for key, recipe in {**self.group.tensors, **untied}.items():
            if not key.endswith((*EMBEDDINGS, *HEADS)) or len(recipe.shape) != 2:
                continue
            found = self.changed[key].rows if key in self.changed else recipe.shape[0]
            if found != rows:
                self.problems.append(
                    f"the adapters grow {', '.join(grown)} to {rows} rows, but {key!r} has {found}: save the adapter "
                    "with its resized embeddings (save_embedding_layers=True), or resize the base first"
                )
        return rows

    def _grew(self, key: str, weight: ChangedWeight) -> bool:
        before = self.group.tensors.get(key)
        return before is not None and len(before.shape) == 2 and weight.rows > before.shape[0]


_MAGNITUDE = "lora_magnitude_vector"


def _shapes(adapter: Adapter, key: str, recipe: Recipe[Place], target: str, shape: tuple[int, ...]) -> str:
    return f"{adapter.path}: {key!r} has the shape {list(recipe.shape)}, the base's {target!r} has {list(shape)}"
