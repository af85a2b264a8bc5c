"""A mapping applied to what a checkpoint holds: the weights, and all that belongs to them.

Optimizer state, masters and averages follow their parameter: they take the same boxes, and are
never cast. Nothing is read: recipes over places become other recipes over places.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.core.errors import Mismatch, Unsupported
from holdfast.format.names import masters_group
from holdfast.mapping.compile.compile import Compiled
from holdfast.mapping.optimizer_state import Scalar, follow
from holdfast.mapping.program import Mapping as Program
from holdfast.mapping.quantized import check_quantized
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.recipe import Recipe

Targets = Mapping[str, TensorSpec]

# States that are one number, also of a parameter that has but one element.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu", "beta1_pow_acc_0", "beta2_pow_acc_0"})


@dataclass(frozen=True, slots=True)
class Same:
    """Scalars of several sources that become one: they must hold the same value."""

    name: str  # "group: key"
    recipes: tuple[Recipe[Place], ...]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Contents under the keys of the target; `kept` names ("group: key") what keeps its initial value."""

    contents: Contents
    kept: frozenset[str] = frozenset()
    same: tuple[Same, ...] = ()
    params: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # what each key of the module became


def map_contents(
    contents: Contents,
    module: str,
    program: Program,
    targets: Targets | None = None,
    *,
    ties: Mapping[str, str] | None = None,
    target_tp: Callable[[str], int | None] | int | None = None,
    lenient: Callable[[str], bool] = lambda key: False,
) -> Mapped:
    """Apply a program to the group `module` and what follows it; `targets` are the keys that are wanted, if known.

    `ties` are targets that are one tensor with another: alias to key. With targets of which `lenient`
    is true the caller sees to what does not fit.
    """
    if module not in contents.groups:
        raise Mismatch(
            f"a mapping is for the group {module!r}, and the checkpoint has {', '.join(contents.groups) or 'nothing'}"
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
    # A tied weight is stored once, and has one state.
    tied = tied_targets(plain, compiled, group.aliases) if targets is None else _live_ties(plain, ties or {})
    follower = _Follower(module, _once(plain, tied), specs)
    check_quantized(follower.compiled.recipes, follower.left_over, specs)
    numbered = {name for name, entry in contents.state.items() if entry.get("numbered")}
    followed = {name: members for name, members in contents.groups.items() if name not in numbered}
    groups = {**contents.groups, **{name: follower.group(name, members) for name, members in followed.items()}}
    groups[module] = _module_group(group, follower, tied)
    params = follower.became()
    state = {name: mapped_entry(name, entry, module, params) for name, entry in contents.state.items()}
    if any(recipe.sources() != [key] or not _is_rename(recipe, compiled) for key, recipe in compiled.recipes.items()):
        # Keys of another model may come in another order: numbers say nothing of them any more.
        state |= {name: state[name] | {"mapped": True} for name in numbered}
    kept = frozenset(f"{module}: {key}" for key in compiled.kept)
    return Mapped(replace(contents, groups=groups, state=state), kept, tuple(follower.same), params)


def replace_key(spec: TensorSpec, key: str) -> TensorSpec:
    return TensorSpec(key, spec.dtype, spec.shape)


def without_aliases(compiled: Compiled, aliases: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> Compiled:
    """The same with every tied key called by the one under which the tensor is kept."""

    def find(key: str) -> Recipe[str]:
        spec = specs[aliases.get(key, key)]
        return Recipe.whole(spec.key, spec.shape, spec.dtype)

    return replace(compiled, recipes={target: recipe.substituted(find) for target, recipe in compiled.recipes.items()})


def tied_targets(compiled: Compiled, named: Compiled, aliases: Mapping[str, str]) -> dict[str, str]:
    """Targets that are whole copies of one tensor because their sources are tied: alias to the key that stays."""
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


def _once(compiled: Compiled, tied: Mapping[str, str]) -> Compiled:
    """Without the second copies of tied targets; a key of which only an alias is made takes the alias's recipe."""
    recipes = {target: recipe for target, recipe in compiled.recipes.items() if target not in tied}
    for alias, key in tied.items():
        recipes.setdefault(key, compiled.recipes[alias])
    return replace(compiled, recipes=recipes)


def _is_rename(recipe: Recipe[str], compiled: Compiled) -> bool:
    sources = recipe.sources()
    return len(sources) == 1 and recipe.is_whole(tuple(compiled.sources[sources[0]].shape))


def _module_group(group: Group, follower: _Follower, tied: dict[str, str]) -> Group:
    compiled = follower.compiled
    tensors = {key: recipe.substituted(group.tensors.__getitem__) for key, recipe in compiled.recipes.items()}
    for key in follower.left_over:
        tensors.setdefault(key, group.tensors[key])
    return Group(group.kind, tensors, tied, _logical(group, compiled))


def _logical(group: Group, compiled: Compiled) -> dict[str, str]:
    out = {}
    for target, recipe in compiled.recipes.items():
        special = [key for key in recipe.sources() if key in group.logical]
        if not special:
            continue
        if not _is_rename(recipe, compiled):
            kept = f"{special[0]} is {group.logical[special[0]]}, kept as pairs or packed bytes"
            raise Unsupported(f"{kept}: a mapping can rename it, and nothing else")
        out[target] = group.logical[special[0]]
    return out


class _Follower:
    """Carries what belongs to the parameters of one module along with them."""

    def __init__(self, module: str, compiled: Compiled, specs: Mapping[str, TensorSpec]) -> None:
        self.compiled = compiled
        self.same: list[Same] = []
        self._module = module
        self._specs = specs
        used = {source for recipe in compiled.recipes.values() for source in recipe.sources()}
        self.left_over = frozenset(key for key in specs if key not in used and key not in compiled.removed)

    def became(self) -> dict[str, tuple[str, ...]]:
        """The targets that are made of each source; a source that nothing uses stays itself."""
        uses: dict[str, list[str]] = {key: [] for key in self._specs}
        for target, recipe in self.compiled.recipes.items():
            for source in recipe.sources():
                uses[source].append(target)
        return {key: (key,) if key in self.left_over else tuple(targets) for key, targets in uses.items()}

    def group(self, name: str, group: Group) -> Group:
        """A group under the keys of the target, if it belongs to the module; else as it is."""
        averages = group.kind == "module" and name.endswith(f"/{self._module}")
        if name == masters_group(self._module) or averages:
            tensors = self._followed(name, group.tensors, "")
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
            found = self._followed(name, states, f"/{state_name}", prefix)
            tensors |= {f"{prefix}{key}/{state_name}": recipe for key, recipe in found.items()}
        return Group(group.kind, tensors, {}, _kept_logical(group, tensors))

    def _followed(
        self, group: str, states: Mapping[str, Recipe[Place]], suffix: str, prefix: str = ""
    ) -> dict[str, Recipe[Place]]:
        own = {key: recipe for key, recipe in states.items() if key in self._specs}
        out = {}
        scalar = suffix.removeprefix("/") in _SCALARS
        for target, made in follow(self.compiled, own, self._specs, scalar=scalar).items():
            if isinstance(made, Scalar):
                self.same.append(Same(f"{group}: {prefix}{target}{suffix}", tuple(own[s] for s in made.sources)))
                out[target] = own[made.sources[0]]
            else:
                out[target] = made.substituted(own.__getitem__)
        for key, recipe in states.items():
            if key in self.left_over or key not in self._specs:
                out.setdefault(key, recipe)
        return out


def own_key(param: str, module: str, keys: Container[str]) -> str | None:
    """A parameter's key in the module, of its key in an optimizer; None for one of another module."""
    if param in keys:
        return param
    inner = param.removeprefix(f"{module}.")
    return inner if inner in keys else None


def _prefix(params: Iterable[str], module: str, keys: Container[str]) -> str:
    """What an optimizer that spans several modules puts before the keys of this one."""
    prefixed = any(param not in keys and own_key(param, module, keys) is not None for param in params)
    return f"{module}." if prefixed else ""


def _kept_logical(group: Group, tensors: Mapping[str, Any]) -> dict[str, str]:
    return {key: name for key, name in group.logical.items() if key in tensors}


def mapped_entry(name: str, entry: Any, module: str, became: Mapping[str, tuple[str, ...]]) -> Any:
    """A state.json entry under the keys of the target: an optimizer's, or that of a dict of tensors.

    Raises Mismatch where parameters with different options or plain values become one.
    """
    if entry.get("kind") == "tensors" and name == module:
        return _mapped_dict(entry, became)
    if entry.get("kind", "optimizer") != "optimizer" or entry.get("numbered"):
        return entry
    prefix = _prefix((param for group in entry["groups"] for param in group["params"]), module, became)

    def targets_of(param: str) -> list[str]:
        own = own_key(param, module, became)
        return [param] if own is None else [f"{prefix}{target}" for target in became[own]]

    options: dict[str, Any] = {}
    groups = []
    for group in entry["groups"]:
        params: dict[str, None] = {}
        for param in group["params"]:
            for target in targets_of(param):
                if options.setdefault(target, group["options"]) != group["options"]:
                    raise Mismatch(f"{name}: {target} is made of parameters with different options, such as {param}")
                params[target] = None
        groups.append({**group, "params": list(params)})
    scalars: dict[str, Any] = {}
    for param, values in entry.get("scalars", {}).items():
        for target in targets_of(param):
            if scalars.setdefault(target, values) != values:
                raise Mismatch(f"{name}: {target} is made of parameters with different plain values, such as {param}")
    stateless = dict.fromkeys(target for param in entry.get("stateless", ()) for target in targets_of(param))
    return {**entry, "groups": groups, "scalars": scalars, "stateless": sorted(stateless)}


def _mapped_dict(entry: Mapping[str, Any], became: Mapping[str, tuple[str, ...]]) -> Any:
    """A flat dict of tensors that refers to what they became, in their order: there and back is the same."""
    value = entry.get("value")
    if not isinstance(value, dict) or any(key.startswith("$") for key in value):
        return entry
    out: dict[str, Any] = {}
    for key, item in value.items():
        if item == {"$tensor": key} and key in became:
            out |= {target: {"$tensor": target} for target in became[key] if target not in out}
        else:
            out[key] = item
    return {**entry, "value": out}
