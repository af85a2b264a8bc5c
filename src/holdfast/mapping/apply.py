"""Apply a program to a checkpoint's contents: weights, ties, groups of optimizer state, state.json entries.

Optimizer state, master weights and averages follow their parameter. They use the same boxes and are
never cast. Nothing is read: recipes over stored places become other recipes over stored places.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.core.names import masters_group
from holdfast.mapping.compile.compile import Compiled
from holdfast.mapping.optimizer_state import Scalar, map_state
from holdfast.mapping.program import Mapping as Program
from holdfast.mapping.quantized import check_quantized
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe
from holdfast.plan.state_references import references

Targets = Mapping[str, TensorSpec]

# Scalar states. They stay scalars even if the parameter has a single element.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu", "beta1_pow_acc_0", "beta2_pow_acc_0"})


@dataclass(frozen=True, slots=True)
class EqualScalars:
    """Scalars of several sources that become one scalar and must be equal."""

    name: str  # "group: key"
    recipes: tuple[Recipe[Place], ...]


@dataclass(frozen=True, slots=True)
class MappedContents:
    """Contents under the target keys. `kept` names ("group: key") the targets that keep their initial value."""

    contents: Contents
    kept: frozenset[str] = frozenset()
    equal_scalars: tuple[EqualScalars, ...] = ()
    params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # targets made from each key of the module


def map_contents(
    contents: Contents,
    module: str,
    program: Program,
    targets: Targets | None = None,
    *,
    ties: Mapping[str, str] | None = None,
    target_tp: Callable[[str], int | None] | int | None = None,
    lenient: Callable[[str], bool] = lambda key: False,
    keeps_numbers: bool = False,
) -> MappedContents:
    """Apply a program to the group `module` and the state that follows it. `targets` are the wanted keys, if known.

    `ties` maps each target alias to the key that shares its tensor. The caller handles mismatches of
    targets for which `lenient` is true. With `keeps_numbers`, parameter numbers of optimizers count the targets.
    """
    if module not in contents.groups:
        raise Mismatch(
            f"the mapping is for the group {module!r}, but the checkpoint has "
            f"{', '.join(contents.groups) or 'no groups'}"
        )
    group = contents.groups[module]
    specs = {key: TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in group.tensors.items()}
    named = {alias: replace_key(specs[key], alias) for alias, key in group.aliases.items() if key in specs}
    compiled = program.compile(
        {**named, **specs},
        targets,
        source_tp=contents.tp_degree,
        target_tp=target_tp,
        spare=named,
        lenient=lenient,
    )
    plain = without_aliases(compiled, group.aliases, specs)
    # A tied weight is stored once and has one state.
    tied = tied_targets(plain, compiled, group.aliases) if targets is None else _live_ties(plain, ties or {})
    mapper = _StateMapper(module, _without_tied_copies(plain, tied), specs)
    check_quantized(mapper.compiled.recipes, mapper.left_over, specs)
    numbered = {name for name, entry in contents.state.items() if entry.get("numbered")}
    mapped = {name: members for name, members in contents.groups.items() if name not in numbered}
    groups = {**contents.groups, **{name: mapper.group(name, members) for name, members in mapped.items()}}
    groups[module] = _module_group(group, mapper, tied)
    params = mapper.targets_by_source()
    state = {name: mapped_entry(name, entry, module, params) for name, entry in contents.state.items()}
    if not keeps_numbers and any(
        recipe.sources() != [key] or not _is_rename(recipe, compiled) for key, recipe in compiled.recipes.items()
    ):
        # The keys of another model may be in another order, which invalidates parameter numbers.
        state |= {name: state[name] | {"mapped": True} for name in numbered}
    kept = frozenset(f"{module}: {key}" for key in compiled.kept)
    return MappedContents(replace(contents, groups=groups, state=state), kept, tuple(mapper.equal_scalars), params)


def replace_key(spec: TensorSpec, key: str) -> TensorSpec:
    return TensorSpec(key, spec.dtype, spec.shape)


def without_aliases(compiled: Compiled, aliases: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> Compiled:
    """Return the same recipes over stored keys: each tied source is replaced by the key that holds its tensor."""

    def find(key: str) -> Recipe[str]:
        spec = specs[aliases.get(key, key)]
        return Recipe.whole(spec.key, spec.shape, spec.dtype)

    return replace(compiled, recipes={target: recipe.substituted(find) for target, recipe in compiled.recipes.items()})


def tied_targets(compiled: Compiled, named: Compiled, aliases: Mapping[str, str]) -> dict[str, str]:
    """Map each target that is a whole copy of another, because their sources are tied, to the key that is kept."""
    out: dict[str, str] = {}
    first: dict[Recipe[str], str] = {}
    by_alias = {t for t, recipe in named.recipes.items() if not aliases.keys().isdisjoint(recipe.sources())}
    for target in sorted(compiled.recipes, key=lambda t: t in by_alias):
        recipe = compiled.recipes[target]
        if not _is_rename(recipe, compiled):
            continue
        other = first.setdefault(recipe, target)
        if other != target and target in by_alias:
            out[target] = other
    return out


def _live_ties(compiled: Compiled, ties: Mapping[str, str]) -> dict[str, str]:
    return {alias: key for alias, key in ties.items() if alias in compiled.recipes}


def _without_tied_copies(compiled: Compiled, tied: Mapping[str, str]) -> Compiled:
    """Drop the recipes of tied aliases; a key without a recipe takes the recipe of its alias."""
    recipes = {target: recipe for target, recipe in compiled.recipes.items() if target not in tied}
    for alias, key in tied.items():
        recipes.setdefault(key, compiled.recipes[alias])
    return replace(compiled, recipes=recipes)


def _is_rename(recipe: Recipe[str], compiled: Compiled) -> bool:
    sources = recipe.sources()
    return len(sources) == 1 and recipe.is_whole(tuple(compiled.sources[sources[0]].shape))


def _module_group(group: Group, mapper: _StateMapper, tied: dict[str, str]) -> Group:
    compiled = mapper.compiled
    tensors = {key: recipe.substituted(group.tensors.__getitem__) for key, recipe in compiled.recipes.items()}
    for key in mapper.left_over:
        tensors.setdefault(key, group.tensors[key])
    return Group(group.kind, tensors, tied, _logical(group, compiled))


def _logical(group: Group, compiled: Compiled) -> dict[str, str]:
    out = {}
    for target, recipe in compiled.recipes.items():
        special = [key for key in recipe.sources() if key in group.logical]
        if not special:
            continue
        if not _is_rename(recipe, compiled):
            kept = f"{special[0]} is {group.logical[special[0]]}, stored as pairs or packed bytes"
            raise Unsupported(f"{kept}: a mapping can only rename it")
        out[target] = group.logical[special[0]]
    return out


class _StateMapper:
    """Maps the state that belongs to the parameters of one module along with them."""

    def __init__(self, module: str, compiled: Compiled, specs: Mapping[str, TensorSpec]) -> None:
        self.compiled = compiled
        self.equal_scalars: list[EqualScalars] = []
        self._module = module
        self._specs = specs
        used = {source for recipe in compiled.recipes.values() for source in recipe.sources()}
        self.left_over = frozenset(key for key in specs if key not in used and key not in compiled.removed)

    def targets_by_source(self) -> dict[str, tuple[str, ...]]:
        """Return the targets made from each source. An unused source maps to itself."""
        uses: dict[str, list[str]] = {key: [] for key in self._specs}
        for target, recipe in self.compiled.recipes.items():
            for source in recipe.sources():
                uses[source].append(target)
        return {key: (key,) if key in self.left_over else tuple(targets) for key, targets in uses.items()}

    def group(self, name: str, group: Group) -> Group:
        """Return the group under the target keys if it belongs to the module, otherwise unchanged."""
        averages = group.kind == "module" and name.endswith(f"/{self._module}")
        if name == masters_group(self._module) or averages:
            tensors = self._map_states(name, group.tensors, "")
            aliases = {}
            if averages:
                aliases = {a: k for a, k in group.aliases.items() if a not in tensors and k in tensors}
            return Group(group.kind, tensors, aliases, _kept_logical(group, tensors))
        if group.kind == "optimizer":
            return self._optimizer(name, group)
        return group

    def _optimizer(self, name: str, group: Group) -> Group:
        by_state: dict[str, dict[str, Recipe[Place]]] = {}
        tensors: dict[str, Recipe[Place]] = {}
        for key, recipe in group.tensors.items():
            param, _, state_name = key.rpartition("/")
            own = own_key(param, self._module, self._specs)
            if own is None:
                tensors[key] = recipe
            else:
                by_state.setdefault(state_name, {})[own] = recipe
        prefix = _prefix((key.rpartition("/")[0] for key in group.tensors), self._module, self._specs)
        for state_name, states in by_state.items():
            found = self._map_states(name, states, f"/{state_name}", prefix)
            tensors |= {f"{prefix}{key}/{state_name}": recipe for key, recipe in found.items()}
        return Group(group.kind, tensors, {}, _kept_logical(group, tensors))

    def _map_states(
        self, group: str, states: Mapping[str, Recipe[Place]], suffix: str, prefix: str = ""
    ) -> dict[str, Recipe[Place]]:
        own = {key: recipe for key, recipe in states.items() if key in self._specs}
        out = {}
        scalar = suffix.removeprefix("/") in _SCALARS
        for target, made in map_state(self.compiled, own, self._specs, scalar=scalar).items():
            if isinstance(made, Scalar):
                self.equal_scalars.append(
                    EqualScalars(f"{group}: {prefix}{target}{suffix}", tuple(own[s] for s in made.sources))
                )
                out[target] = own[made.sources[0]]
            else:
                out[target] = made.substituted(own.__getitem__)
        for key, recipe in states.items():
            if key in self.left_over or key not in self._specs:
                out.setdefault(key, recipe)
        return out


def own_key(param: str, module: str, keys: Container[str]) -> str | None:
    """Return the module key of an optimizer's parameter key, or None for a parameter of another module."""
    if param in keys:
        return param
    inner = param.removeprefix(f"{module}.")
    return inner if inner in keys else None


def _prefix(params: Iterable[str], module: str, keys: Container[str]) -> str:
    """Return the prefix that an optimizer over several modules adds to the keys of this module."""
    prefixed = any(param not in keys and own_key(param, module, keys) is not None for param in params)
    return f"{module}." if prefixed else ""


def _kept_logical(group: Group, tensors: Mapping[str, Any]) -> dict[str, str]:
    return {key: name for key, name in group.logical.items() if key in tensors}


def mapped_entry(name: str, entry: Any, module: str, targets_by_source: Mapping[str, tuple[str, ...]]) -> Any:
    """Return a state.json entry, of an optimizer or a dict of tensors, under the target keys.

    Raises Mismatch where parameters with different options or scalar values are merged.
    """
    if entry.get("kind") == "tensors" and name == module:
        return _mapped_dict(entry, targets_by_source)
    if entry.get("kind", "optimizer") != "optimizer" or entry.get("numbered"):
        return entry
    refuse_nested_states(name, entry)
    prefix = _prefix((param for group in entry["groups"] for param in group["params"]), module, targets_by_source)

    def targets_of(param: str) -> list[str]:
        own = own_key(param, module, targets_by_source)
        return [param] if own is None else [f"{prefix}{target}" for target in targets_by_source[own]]

    options: dict[str, Any] = {}
    groups = []
    for group in entry["groups"]:
        params: dict[str, None] = {}
        for param in group["params"]:
            for target in targets_of(param):
                if options.setdefault(target, group["options"]) != group["options"]:
                    raise Mismatch(f"{name}: {target} is built from parameters with different options, such as {param}")
                params[target] = None
        groups.append({**group, "params": list(params)})
    scalars: dict[str, Any] = {}
    for param, values in entry.get("scalars", {}).items():
        for target in targets_of(param):
            if scalars.setdefault(target, values) != values:
                raise Mismatch(
                    f"{name}: {target} is built from parameters with different scalar values, such as {param}"
                )
    stateless = dict.fromkeys(target for param in entry.get("stateless", ()) for target in targets_of(param))
    return {**entry, "groups": groups, "scalars": scalars, "stateless": sorted(stateless)}


def refuse_nested_states(name: str, entry: Mapping[str, Any]) -> None:
    """Raise Unsupported for an optimizer whose states hold tensors in lists or dicts: they follow no mapping."""
    nested = next(iter(references(entry.get("scalars", {}))), None)
    if nested is not None:
        raise Unsupported(f"{name}: a mapping cannot follow states with tensors inside, such as {nested}")


def _mapped_dict(entry: Mapping[str, Any], targets_by_source: Mapping[str, tuple[str, ...]]) -> Any:
    """Rewrite a flat dict of tensor references to the target keys, in order, so that a round trip restores it."""
    value = entry.get("value")
    if not isinstance(value, dict) or any(key.startswith("$") for key in value):
        return entry
    out: dict[str, Any] = {}
    for key, item in value.items():
        if item == {"$tensor": key} and key in targets_by_source:
            out |= {target: {"$tensor": target} for target in targets_by_source[key] if target not in out}
        else:
            out[key] = item
    return {**entry, "value": out}
