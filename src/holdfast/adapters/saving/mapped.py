"""Saving through a mapping: what a rank holds of live tensors, offered under the keys of the file.

The live state is seen as contents whose places are live tensors. A mapping makes other contents
of it, and every term of those is a view of a live tensor: nothing is copied.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from holdfast.adapters.live_state import LiveState
from holdfast.adapters.module import unwrap
from holdfast.adapters.saving.collect import Collected, Offer
from holdfast.adapters.tensors import Holder, holder_of, part_view
from holdfast.adapters.tree import flatten
from holdfast.core.errors import Unsupported
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.layout.placement import ShardBox
from holdfast.layout.spread import Boxes, OnMesh, RankLayout, Whole
from holdfast.mapping.apply import EqualScalars, MappedContents, map_contents, mapped_entry
from holdfast.mapping.per_module import ModelInfo, programs
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe, Term
from holdfast.plan.recipe_fill import target_view_steps


@dataclass(frozen=True, slots=True)
class StoredKeys:
    """A mapping worked out for one layout: what each live tensor becomes in the file."""

    groups: Mapping[str, Group]
    became: Mapping[str, Mapping[str, tuple[str, ...]]]  # by module: the targets that are made of each key
    uses: Mapping[tuple[str, str], tuple[tuple[str, str, Recipe[Place]], ...]]  # of each live tensor

    def offers(self, collected: Collected) -> Collected:
        """The same state, offered under the keys of the file."""
        made: list[Offer] = []
        fixed = 0
        for number, offer in enumerate(collected.offers):
            if number == collected.fixed:
                fixed = len(made)
            made += self._made_of(offer)
        optimizers = dict(collected.optimizers)
        for module, params in self.became.items():
            optimizers = {name: mapped_entry(name, entry, module, params) for name, entry in optimizers.items()}
        aliases = dict(collected.aliases)
        for group, members in self.groups.items():
            if group in aliases:
                aliases[group] = dict(members.aliases)
        fixed = len(made) if collected.fixed >= len(collected.offers) else fixed
        return replace(collected, offers=made, optimizers=optimizers, aliases=aliases, fixed=fixed)

    def _made_of(self, offer: Offer) -> Iterator[Offer]:
        name = (offer.group, offer.key)
        if name not in self.uses:
            if offer.group not in self.groups:
                yield offer  # of a group that joined after the mapping was worked out
            return
        for group, key, recipe in self.uses[name]:
            if recipe.is_whole(recipe.terms[0].source.spec.shape):
                yield replace(offer, group=group, key=key)
                continue
            for term in recipe.terms:
                if (term.source.file, term.source.spec.key) == name:
                    yield from _term_offers(offer, group, key, recipe, term)


def _term_offers(offer: Offer, group: str, key: str, recipe: Recipe[Place], term: Term[Place]) -> Iterator[Offer]:
    """What this rank holds of one term, as views of the live tensor."""
    cast = _cast(offer, term, key)
    if not math.prod(recipe.shape):
        empty = Holder(offer.holder.logical, recipe.shape, (), offer.holder.local.new_empty(recipe.shape), Boxes(()))
        yield replace(offer, group=group, key=key, holder=empty, cast=cast)
        return
    for part in offer.holder.parts:
        common = part.box.intersect(term.part)
        if common is None:
            continue
        dropped, moved, raised = target_view_steps(term.order, len(common.sizes))
        view = part_view(offer.holder, part)[common.within(part.box)][dropped].permute(moved)[raised]
        box = term.target_box(common)
        parts = (ShardBox(box, Box.full(box.sizes)),)
        holder = Holder(offer.holder.logical, recipe.shape, parts, view, Boxes((box,)))
        yield replace(offer, group=group, key=key, holder=holder, cast=cast)


def _cast(offer: Offer, term: Term[Place], key: str) -> DType | None:
    chain = [dtype for dtype in (offer.cast, *term.casts) if dtype is not None]
    if len(chain) > 1:
        names = ", ".join(dtype.name for dtype in chain)
        raise Unsupported(f"{key}: it would be cast to {names} in turn on its way into the file; cast it once")
    return chain[0] if chain else None


def work_out(ranks: Ranks, collected: Collected, given: Any, state: Mapping[str, Any]) -> StoredKeys:
    """Work out what was given as mapping for what all ranks hold together. Collective."""
    everyone = run_on_all_ranks(
        ranks, lambda: _describe(collected, {name: config_of(state.get(name)) for name in state})
    )
    made: list[StoredKeys] = []

    def work() -> None:
        contents = _contents_of(everyone)
        configs = {name: config for answer in everyone for name, config in answer["configs"].items() if config}
        named = {name: group for name, group in contents.groups.items() if "/" not in name}
        modules = [name for name, group in named.items() if group.kind in ("module", "tensors")]
        mapped = []

        def model_info(module: str) -> ModelInfo:
            return ModelInfo(configs.get(module), contents.groups[module].tensors)

        for module, program in programs(given, modules, model_info).items():
            mapped.append((module, map_contents(contents, module, program)))
            contents = mapped[-1][1].contents
        made.append(_stored_keys(contents, mapped))

    run_on_all_ranks(ranks, work)
    return made[0]


def config_of(module: Any) -> dict[str, Any] | None:
    """The config of a model that has one, as its config.json says it."""
    config = getattr(unwrap(module), "config", None) if isinstance(module, nn.Module) else None
    return dict(config.to_dict()) if config is not None and hasattr(config, "to_dict") else None


def _describe(collected: Collected, configs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = [[o.group, o.key, o.stored.name, o.logical.name, list(o.holder.shape)] for o in collected.offers]
    degrees = {tp_degree(offer.holder.how) for offer in collected.offers if offer.role in ("parameter", "value")}
    return {
        "tensors": tensors,
        "kinds": collected.kinds,
        "aliases": collected.aliases,
        "tp_degrees": sorted(degrees, key=str),
        "configs": {name: json.loads(json.dumps(config, default=str)) for name, config in configs.items() if config},
    }


def tp_degree(how: RankLayout) -> int | None:
    """The tensor-parallel degree of a live tensor; None where its mesh does not say what its axes are."""
    if not isinstance(how, OnMesh):
        return 1 if isinstance(how, Whole) else None
    return how.mesh.tp_degree


def _contents_of(everyone: Sequence[Mapping[str, Any]]) -> Contents:
    """The live state of all ranks as contents: each tensor a place of its own."""
    kinds: dict[str, str] = {}
    aliases: dict[str, dict[str, str]] = {}
    tensors: dict[str, dict[str, Recipe[Place]]] = {}
    logical: dict[str, dict[str, str]] = {}
    for answer in everyone:
        kinds |= answer["kinds"]
        for group, ties in answer["aliases"].items():
            aliases.setdefault(group, {}).update(ties)
        for group, key, stored, logical_name, shape in answer["tensors"]:
            spec = TensorSpec(key, dtype_named(stored), tuple(shape))
            tensors.setdefault(group, {})[key] = Recipe.whole(Place(spec, group, 0), spec.shape, spec.dtype)
            if stored != logical_name:
                logical.setdefault(group, {})[key] = logical_name
    groups = {
        name: Group(kind, tensors.get(name, {}), aliases.get(name, {}), logical.get(name, {}))
        for name, kind in kinds.items()
    }
    degrees = {degree for answer in everyone for degree in answer["tp_degrees"]}
    known = {degree for degree in degrees if degree is not None}
    return Contents(groups, (), tp_degree=None if None in degrees else max(known, default=1))


def _stored_keys(contents: Contents, mapped: Sequence[tuple[str, MappedContents]]) -> StoredKeys:
    uses: dict[tuple[str, str], list[tuple[str, str, Recipe[Place]]]] = {}
    for name, group in contents.groups.items():
        for key, recipe in group.tensors.items():
            for place in recipe.sources():
                uses.setdefault((place.file, place.spec.key), []).append((name, key, recipe))
    for same in (same for _, one in mapped for same in one.equal_scalars):
        # Offered as replicas of one tensor, they are compared as replicas are.
        name, _, key = same.name.partition(": ")
        for recipe in same.recipes[1:]:
            for place in recipe.sources():
                uses.setdefault((place.file, place.spec.key), []).append((name, key, recipe))
    became = {module: one.params for module, one in mapped}
    return StoredKeys(contents.groups, became, {name: tuple(found) for name, found in uses.items()})


def describe_targets(live: LiveState) -> dict[str, Any]:
    """The tensors that a mapping may fill on this rank, by group: dtype, shape and TP degree by key; ties."""
    tensors = {name: dict(view.tensors) for name, view in live.modules.items()}
    tensors |= {name: flatten(name, value).tensors for name, value in live.trees.items()}
    out: dict[str, Any] = {}
    for group, members in tensors.items():
        described = {}
        for key, tensor in members.items():
            holder = holder_of(tensor, f"{group}: {key}")
            described[key] = [holder.stored.name, list(holder.shape), tp_degree(holder.how)]
        ties = dict(live.modules[group].ties) if group in live.modules else {}
        out[group] = {"tensors": described, "ties": ties}
    return out


def map_stored(
    contents: Contents,
    given: Any,
    everyone: Sequence[Mapping[str, Any]],
    config: Callable[[str], Mapping[str, Any] | None],
    *,
    reverse: bool = False,
    lenient: Callable[[str, str], bool] = lambda module, key: False,
) -> MappedContents:
    """What a checkpoint holds, under the keys of the live state of all ranks.

    `lenient` says of which group and key a misfit is found later.
    """
    wanted: dict[str, dict[str, tuple[TensorSpec, int | None]]] = {}
    ties: dict[str, dict[str, str]] = {}
    for answer in everyone:
        for group, members in answer.items():
            ties.setdefault(group, {}).update(members["ties"])
            for key, (dtype, shape, degree) in members["tensors"].items():
                spec = TensorSpec(key, dtype_named(dtype), tuple(shape))
                wanted.setdefault(group, {})[key] = (spec, degree)
    kept: frozenset[str] = frozenset()
    same: tuple[EqualScalars, ...] = ()

    def model_info(module: str) -> ModelInfo:
        stored = contents.groups[module].tensors if module in contents.groups else None
        live = wanted[module]
        return ModelInfo(config(module), *((live, stored) if reverse else (stored, live)))

    for module, program in programs(given, list(wanted), model_info, reverse=reverse).items():
        targets = wanted[module]
        specs = {key: spec for key, (spec, _) in targets.items()}
        degrees = {key: degree for key, (_, degree) in targets.items()}
        mapped = map_contents(
            contents,
            module,
            program,
            specs,
            ties=ties[module],
            target_tp=degrees.get,
            lenient=functools.partial(lenient, module),
        )
        contents, kept, same = mapped.contents, kept | mapped.kept, (*same, *mapped.equal_scalars)
    return MappedContents(contents, kept, same)
