"""A mapping applied to a save: the live tensors under the keys of the file.

The live state is treated as contents whose places are live tensors. Every term of the
mapped contents is a view of a live tensor, so nothing is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from holdfast.adapters.hub.saved_names import HubRequest, derive_names, fallback_notice, unopenable
from holdfast.adapters.huggingface import CONFIG_FILES, config_of
from holdfast.adapters.saving.collect import Collected, SaveItem
from holdfast.adapters.saving.save_selection import SaveSelection
from holdfast.adapters.tensors import Holder, part_view
from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.layout.placement import Boxes, ShardBox
from holdfast.mapping.apply import MappedContents, map_contents, mapped_entry, refuse_nested_states
from holdfast.mapping.per_module import ModelInfo, programs
from holdfast.mapping.program import Mapping as Program
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
    recorded: Mapping[str, str] = field(default_factory=dict)  # by module: the mapping to names on the hub
    notices: tuple[str, ...] = ()  # warnings for the user about names
    omitted_files: frozenset[str] = frozenset()  # config files that would promise what from_pretrained cannot do
    _cuts: dict[Any, tuple[_Cut, ...]] = field(default_factory=dict)  # by live tensor and its parts, found once

    def map_items(self, collected: Collected) -> Collected:
        """Return the same state under the keys of the file."""
        files = {name: data for name, data in collected.files.items() if name not in self.omitted_files}
        if not self.targets:
            return replace(collected, files=files)
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
        return replace(collected, items=mapped, optimizers=optimizers, aliases=aliases, files=files, fixed=fixed)

    def _map_item(self, item: SaveItem) -> Iterator[SaveItem]:
        name = (item.group, item.key)
        if name not in self.uses:
            if name not in self.known:
                yield item  # added since, as the states of a first step: the layout is surveyed again
            return
        if item.outer:
            self._refuse_renamed(item)
        found = self._cuts.get((name, item.holder.parts))
        if found is None:
            found = self._cuts[name, item.holder.parts] = tuple(self._cuts_of(item, name))
        for cut in found:
            yield cut.applied(item)

    def _cuts_of(self, item: SaveItem, name: tuple[str, str]) -> Iterator[_Cut]:
        for group, key, recipe in self.uses[name]:
            if recipe.is_whole(recipe.terms[0].source.spec.shape):
                yield _Cut(group, key)
                continue
            for term in recipe.terms:
                if (term.source.file, term.source.spec.key) == name:
                    yield from _term_cuts(item, group, key, recipe, term)

    def _refuse_renamed(self, item: SaveItem) -> None:
        """Raise Unsupported if the mapping changes a tensor inside of a tensor subclass."""
        uses = self.uses[item.group, item.key]
        same = [(group, key) for group, key, _ in uses] == [(item.group, item.key)]
        if not same or not uses[0][2].is_whole(item.holder.shape):
            raise Unsupported(
                f"{item.group}: a mapping cannot follow the tensor subclass {item.outer}: it would change {item.key}, "
                "one of the tensors inside"
            )


@dataclass(frozen=True, slots=True)
class _Cut:
    """The part of a live tensor that goes to one stored tensor, found once for a layout; the whole without a recipe."""

    group: str
    key: str
    recipe: Recipe[Place] | None = None
    term: Term[Place] | None = None
    part: ShardBox | None = None  # None: the stored tensor is empty
    within: Any = ()
    steps: tuple[Any, Any, Any] = ((), (), ())
    box: Box | None = None

    def applied(self, item: SaveItem) -> SaveItem:
        """Return the part of this item as a view of the live tensor."""
        if self.recipe is None or self.term is None:
            return replace(item, group=self.group, key=self.key)
        cast, logical, shape = _cast(item, self.term, self.key), item.holder.logical, self.recipe.shape
        if self.part is None or self.box is None:
            holder = Holder(logical, shape, (), item.holder.local.new_empty(shape), Boxes(()))
        else:
            dropped, moved, raised = self.steps
            view = part_view(item.holder, self.part)[self.within][dropped].permute(moved)[raised]
            parts = (ShardBox(self.box, Box.full(self.box.sizes)),)
            holder = Holder(logical, shape, parts, view, Boxes((self.box,)))
        return replace(item, group=self.group, key=self.key, holder=holder, cast=cast)


def _term_cuts(item: SaveItem, group: str, key: str, recipe: Recipe[Place], term: Term[Place]) -> Iterator[_Cut]:
    """Yield the parts of one term that this rank holds."""
    if not math.prod(recipe.shape):
        yield _Cut(group, key, recipe, term)
        return
    for part in item.holder.parts:
        common = part.box.intersect(term.part)
        if common is not None:
            steps = target_view_steps(term.order, len(common.sizes))
            yield _Cut(group, key, recipe, term, part, common.within(part.box), steps, term.target_box(common))


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
    hub: HubRequest,
    selection: SaveSelection | None = None,
) -> StoredKeys:
    """Resolve a mapping, and the names on the hub of modules without one, for the tensors of all ranks. Collective.

    A `selection` leaves out the stored tensors that are made of unselected live ones.
    """

    def describe() -> dict[str, Any]:
        configs = {name: config_of(state.get(name)) for name in state} if mapping is not None else {}
        return CollectedTensors.of(collected, configs).fields()

    described = [CollectedTensors(**fields) for fields in run_on_all_ranks(ranks, describe)]
    resolver = _Resolver(ranks, described, mapping, selection)
    run_on_all_ranks(ranks, resolver.map_user)
    resolver.map_hub(state, hub)
    stored = resolver.stored_keys()
    problems = run_on_all_ranks(ranks, lambda: _problem_of(stored, collected))
    problem = next(filter(None, problems), "")
    if problem and resolver.on_hub:  # an option or state of the optimizer that follows no mapping
        resolver.undo_hub(state, hub, problem)
        return resolver.stored_keys()
    return stored


def _problem_of(stored: StoredKeys, collected: Collected) -> str:
    if not stored.recorded:
        return ""
    try:
        for name, entry in collected.optimizers.items():
            refuse_nested_states(name, entry)
        stored.map_items(collected)
    except (Mismatch, Unsupported) as error:
        return str(error)
    return ""


class _Resolver:
    """Maps the contents of all ranks module by module. Every rank holds the same contents and takes the same steps."""

    def __init__(
        self,
        ranks: Ranks,
        described: Sequence[CollectedTensors],
        mapping: Any,
        selection: SaveSelection | None = None,
    ) -> None:
        self._ranks = ranks
        self._selection = selection
        self._described = described
        self._mapping = mapping
        self._live = self._plain = self._contents = _contents_of(described)
        self._mapped: list[tuple[str, MappedContents]] = []
        self._plain_mapped: list[tuple[str, MappedContents]] = []
        self.on_hub: dict[str, str] = {}  # by module, the mappings in use
        self._problems: dict[str, str] = {}
        self._without_config: list[str] = []

    def map_user(self) -> None:
        """Apply the mapping that the user gave."""
        if self._mapping is None:
            return
        contents = self._contents
        configs = {name: config for rank_tensors in self._described for name, config in rank_tensors.configs.items()}
        named = {name: group for name, group in contents.groups.items() if "/" not in name}
        modules = [name for name, group in named.items() if group.kind in ("module", "tensors")]

        def model_info(module: str) -> ModelInfo:
            return ModelInfo(configs.get(module), contents.groups[module].tensors)

        for module, program in programs(self._mapping, modules, model_info).items():
            self._apply(module, program)
        self._plain, self._plain_mapped = self._contents, list(self._mapped)

    def _apply(self, module: str, program: Program) -> None:
        mapped = map_contents(self._contents, module, program)
        self._mapped.append((module, mapped))
        self._contents = mapped.contents

    def map_hub(self, state: Mapping[str, Any], hub: HubRequest) -> None:
        """Give the other modules their names on the hub, or those that the run has used before. Collective."""
        users = {module for module, _ in self._mapped}
        open_modules = {name: rank for name, rank in hub.candidates.items() if name not in users}
        derived: dict[str, int] = {}
        for module, rank in open_modules.items():
            kept = hub.kept.get(module)
            if kept is None or (kept and not self._try(module, kept)):
                derived[module] = rank
        if not derived:
            return
        texts, self._problems = derive_names(self._ranks, state, derived, self._shapes())
        for module, text in texts.items():
            if text and not self._try(module, text):
                self.on_hub.pop(module, None)
        self._note_config(state, hub)

    def _shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        groups = self._plain.groups.items()
        return {name: {key: recipe.shape for key, recipe in group.tensors.items()} for name, group in groups}

    def _try(self, module: str, text: str) -> bool:
        """Apply a derived mapping; a state that cannot follow it, such as a factored one, prevents it."""
        try:
            program = Program.parse(text)
            program.reverse()
            self._apply(module, program)
        except (InvalidArgument, Mismatch, Unsupported) as error:
            self._problems[module] = str(error)
            return False
        self._problems.pop(module, None)
        self.on_hub[module] = text
        return True

    def undo_hub(self, state: Mapping[str, Any], hub: HubRequest, problem: str) -> None:
        """Return to the names in memory. Collective."""
        self._problems |= dict.fromkeys(self.on_hub, problem)
        self.on_hub.clear()
        self._contents, self._mapped = self._plain, list(self._plain_mapped)
        self._note_config(state, hub)

    def _note_config(self, state: Mapping[str, Any], hub: HubRequest) -> None:
        failed = {name: rank for name, rank in hub.candidates.items() if name in self._problems}
        self._without_config = unopenable(self._ranks, state, failed, self._shapes()) if failed else []

    def stored_keys(self) -> StoredKeys:
        """Return the result so far."""
        notices = [
            fallback_notice(name, problem, opens=name not in self._without_config)
            for name, problem in self._problems.items()
        ]
        contents = self._contents
        if self._selection is not None:
            contents = _selected(contents, self._live, self._selection)
            for module, one in self._mapped:
                _require_weights(module, one.contents, contents)
        known = frozenset((name, key) for name, group in self._live.groups.items() for key in group.tensors)
        found = _stored_keys(contents, self._mapped, known)
        return replace(
            found,
            recorded=dict(self.on_hub),
            notices=tuple(notices),
            omitted_files=frozenset(CONFIG_FILES if "model" in self._without_config else ()),
        )


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
