"""A mapping applied to a save: the live tensors under the keys of the file.

The live state is treated as contents whose places are live tensors. Every term of the
mapped contents is a view of a live tensor, so nothing is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from holdfast.adapters.huggingface import config_of
from holdfast.adapters.saving.collect import Collected, SaveItem
from holdfast.adapters.saving.save_selection import SaveSelection
from holdfast.adapters.tensors import Holder, part_view
from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.layout.placement import Boxes, ShardBox
from holdfast.mapping.apply import MappedContents, map_contents, mapped_entry
from holdfast.mapping.per_module import ModelInfo, programs
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe, Term, target_view_steps


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """A mapping resolved for one layout: the stored tensors made from each live tensor."""

    groups: Mapping[str, Group]
    targets: Mapping[str, Mapping[str, tuple[str, ...]]]  # by module and live key: the stored keys
    uses: Mapping[tuple[str, str], tuple[tuple[str, str, Recipe[Place]], ...]]  # by live tensor
    known: frozenset[tuple[str, str]]  # the live tensors of all ranks that the mapping was resolved for

    def map_items(self, collected: Collected) -> Collected:
        """Return the same state under the keys of the file."""
        mapped: list[SaveItem] = []
        fixed = 0
        for number, item in enumerate(collected.items):
            if number == collected.fixed:
                fixed = len(mapped)
            mapped += self._map_item(item)
        optimizers = dict(collected.optimizers)
        for module, params in self.targets.items():
            optimizers = {name: mapped_entry(name, entry, module, params) for name, entry in optimizers.items()}
        aliases = dict(collected.aliases)
        for group, members in self.groups.items():
            if group in aliases:
                aliases[group] = dict(members.aliases)
        fixed = len(mapped) if collected.fixed >= len(collected.items) else fixed
        return replace(collected, items=mapped, optimizers=optimizers, aliases=aliases, fixed=fixed)

    def _map_item(self, item: SaveItem) -> Iterator[SaveItem]:
        name = (item.group, item.key)
        if name not in self.uses:
            if name not in self.known:
                yield item  # added since, as the states of a first step: the layout is surveyed again
            return
        if item.outer:
            self._refuse_renamed(item)
        for group, key, recipe in self.uses[name]:
            if recipe.is_whole(recipe.terms[0].source.spec.shape):
                yield replace(item, group=group, key=key)
                continue
            for term in recipe.terms:
                if (term.source.file, term.source.spec.key) == name:
                    yield from _term_items(item, group, key, recipe, term)

    def _refuse_renamed(self, item: SaveItem) -> None:
        """Raise Unsupported if the mapping changes a tensor inside of a tensor subclass."""
        uses = self.uses[item.group, item.key]
        same = [(group, key) for group, key, _ in uses] == [(item.group, item.key)]
        if not same or not uses[0][2].is_whole(item.holder.shape):
            raise Unsupported(
                f"{item.group}: a mapping cannot follow the tensor subclass {item.outer}: it would change {item.key}, "
                "one of the tensors inside"
            )


def _term_items(item: SaveItem, group: str, key: str, recipe: Recipe[Place], term: Term[Place]) -> Iterator[SaveItem]:
    """Yield the parts of one term that this rank holds, as views of the live tensor."""
    cast = _cast(item, term, key)
    if not math.prod(recipe.shape):
        empty = Holder(item.holder.logical, recipe.shape, (), item.holder.local.new_empty(recipe.shape), Boxes(()))
        yield replace(item, group=group, key=key, holder=empty, cast=cast)
        return
    for part in item.holder.parts:
        common = part.box.intersect(term.part)
        if common is None:
            continue
        dropped, moved, raised = target_view_steps(term.order, len(common.sizes))
        view = part_view(item.holder, part)[common.within(part.box)][dropped].permute(moved)[raised]
        box = term.target_box(common)
        parts = (ShardBox(box, Box.full(box.sizes)),)
        holder = Holder(item.holder.logical, recipe.shape, parts, view, Boxes((box,)))
        yield replace(item, group=group, key=key, holder=holder, cast=cast)


def _cast(item: SaveItem, term: Term[Place], key: str) -> DType | None:
    chain = [dtype for dtype in (item.cast, *term.casts) if dtype is not None]
    if len(chain) > 1:
        names = ", ".join(dtype.name for dtype in chain)
        raise Unsupported(f"{key} would be cast several times before it is written: to {names}; cast it once")
    return chain[0] if chain else None


def resolve_mapping(
    ranks: Ranks,
    collected: Collected,
    mapping: Any,
    state: Mapping[str, Any],
    selection: SaveSelection | None = None,
) -> StoredKeys:
    """Resolve a mapping for the tensors of all ranks. Collective.

    A `selection` leaves out the stored tensors that are made of unselected live ones.
    """

    def describe() -> dict[str, Any]:
        return CollectedTensors.of(collected, {name: config_of(state.get(name)) for name in state}).fields()

    described = [CollectedTensors(**fields) for fields in run_on_all_ranks(ranks, describe)]
    resolved: list[StoredKeys] = []

    def resolve() -> None:
        live = contents = _contents_of(described)
        configs = {name: config for rank_tensors in described for name, config in rank_tensors.configs.items()}
        named = {name: group for name, group in contents.groups.items() if "/" not in name}
        modules = [name for name, group in named.items() if group.kind in ("module", "tensors")]
        mapped = []

        def model_info(module: str) -> ModelInfo:
            return ModelInfo(configs.get(module), contents.groups[module].tensors)

        for module, program in programs(mapping, modules, model_info).items():
            mapped.append((module, map_contents(contents, module, program)))
            contents = mapped[-1][1].contents
        if selection is not None:
            contents = _selected(contents, live, selection)
            for module, one in mapped:
                _require_weights(module, one.contents, contents)
        known = frozenset((name, key) for name, group in live.groups.items() for key in group.tensors)
        resolved.append(_stored_keys(contents, mapped, known))

    run_on_all_ranks(ranks, resolve)
    return resolved[0]


@dataclass(frozen=True, slots=True)
class CollectedTensors:
    """The tensors that one rank saves, as the ranks exchange them to resolve a mapping. All fields are JSON."""

    tensors: Sequence[Sequence[Any]]  # group, key, stored dtype, logical dtype, shape
    kinds: Mapping[str, str]
    aliases: Mapping[str, Mapping[str, str]]
    tp_degrees: Sequence[int | None]
    configs: Mapping[str, Any]  # of the Hugging Face models, by group

    @staticmethod
    def of(collected: Collected, configs: Mapping[str, Any]) -> CollectedTensors:
        tensors = [[o.group, o.key, o.stored.name, o.logical.name, list(o.holder.shape)] for o in collected.items]
        degrees = {item.holder.how.tp_degree for item in collected.items if item.role in ("parameter", "value")}
        plain = {name: json.loads(json.dumps(config, default=str)) for name, config in configs.items() if config}
        return CollectedTensors(tensors, collected.kinds, collected.aliases, sorted(degrees, key=str), plain)

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def _contents_of(described: Sequence[CollectedTensors]) -> Contents:
    """Return the live state of all ranks as contents, with one place per tensor."""
    kinds: dict[str, str] = {}
    aliases: dict[str, dict[str, str]] = {}
    tensors: dict[str, dict[str, Recipe[Place]]] = {}
    logical: dict[str, dict[str, str]] = {}
    for collected in described:
        kinds |= collected.kinds
        for group, ties in collected.aliases.items():
            aliases.setdefault(group, {}).update(ties)
        for group, key, stored, logical_name, shape in collected.tensors:
            spec = TensorSpec(key, dtype_named(stored), tuple(shape))
            tensors.setdefault(group, {})[key] = Recipe.whole(Place(spec, group, 0), spec.shape, spec.dtype)
            if stored != logical_name:
                logical.setdefault(group, {})[key] = logical_name
    groups = {
        name: Group(kind, tensors.get(name, {}), aliases.get(name, {}), logical.get(name, {}))
        for name, kind in kinds.items()
    }
    degrees = {degree for collected in described for degree in collected.tp_degrees}
    known = {degree for degree in degrees if degree is not None}
    return Contents(groups, (), tp_degree=None if None in degrees else max(known, default=1))


def _selected(contents: Contents, live: Contents, selection: SaveSelection) -> Contents:
    """Return the mapped contents that are made of selected live tensors; raises InvalidArgument for a mixture."""
    kinds = {name: group.kind for name, group in live.groups.items()}
    aliases = {name: group.aliases for name, group in live.groups.items()}
    groups = {}
    for name, group in contents.groups.items():
        tensors = {}
        for key, recipe in group.tensors.items():
            sources = {(place.file, place.spec.key) for place in recipe.sources()}
            chosen = {source for source in sources if selection.selects(kinds, aliases, *source)}
            if chosen and chosen != sources:
                (group_in, key_in), (group_out, key_out) = min(chosen), min(sources - chosen)
                raise InvalidArgument(
                    f"only= and ignore= select {group_in}: {key_in} and leave out {group_out}: {key_out}, but the "
                    f"mapping stores both in {name}: {key}; select both or neither"
                )
            if chosen:
                tensors[key] = recipe
        ties = {alias: key for alias, key in group.aliases.items() if key in tensors}
        groups[name] = replace(group, tensors=tensors, aliases=ties)
    return replace(contents, groups=groups)


def _require_weights(module: str, mapped: Contents, chosen: Contents) -> None:
    """Raise InvalidArgument if states are selected without their weights: the reverse would not know their keys."""
    left = mapped.groups[module].tensors.keys() - chosen.groups[module].tensors.keys()
    for name, group in chosen.groups.items():
        for key in group.tensors if group.kind == "optimizer" else ():
            if (param := key.rpartition("/")[0]) in left:
                raise InvalidArgument(
                    f"only= and ignore= select {name}: {key} and leave out {module}: {param}; the states of mapped "
                    f"weights are saved with them: ignore the states, too, as in '{param}/*'"
                )


def _stored_keys(
    contents: Contents, mapped: Sequence[tuple[str, MappedContents]], known: frozenset[tuple[str, str]]
) -> StoredKeys:
    uses: dict[tuple[str, str], list[tuple[str, str, Recipe[Place]]]] = {}
    for name, group in contents.groups.items():
        for key, recipe in group.tensors.items():
            for place in recipe.sources():
                uses.setdefault((place.file, place.spec.key), []).append((name, key, recipe))
    for same in (same for _, one in mapped for same in one.equal_scalars):
        # Saved as replicas of one tensor, so that the save checks them for equality.
        name, _, key = same.name.partition(": ")
        for recipe in same.recipes[1:]:
            for place in recipe.sources():
                uses.setdefault((place.file, place.spec.key), []).append((name, key, recipe))
    targets = {module: one.params for module, one in mapped}
    return StoredKeys(contents.groups, targets, {name: tuple(users) for name, users in uses.items()}, known)
