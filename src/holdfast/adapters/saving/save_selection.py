"""The selection of a save: `only=` and `ignore=` applied to the state of one rank, with the patterns of a load.

The patterns match the keys of the live state, before a mapping renames them. What a pattern selects here,
the same pattern selects in a load into the same state.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.adapters.optimizer import inner_optimizer, state_names
from holdfast.adapters.saving.collect import Collected, SaveItem
from holdfast.adapters.tree import Tree
from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.core.names import ADAPTER, BASE, masters_group
from holdfast.plan.contents import KeySelection
from holdfast.plan.state_references import references, without_references

_DESCRIBED = ("module", ADAPTER, BASE)  # kinds of groups that a config file describes


@dataclass(frozen=True, slots=True)
class RankSelection:
    """The selection of one rank, as the ranks exchange it. All fields are JSON."""

    used: Sequence[str]  # the patterns that matched anything
    incomplete: Sequence[str]  # the groups of modules of which tensors are left out
    is_empty: bool  # nothing is left


@dataclass(slots=True)
class SaveSelection:
    """Selects what one rank saves. The patterns stay the same over all saves of a run, so decisions are cached.

    `incomplete` are the groups of modules of which any rank leaves tensors out: a config.json would make
    from_pretrained open them with freshly initialized weights, so they get none.
    """

    choice: KeySelection
    incomplete: frozenset[str] = frozenset()
    _decisions: dict[tuple[str, str, bool], bool] = field(default_factory=dict)

    def drops(self, name: str, *, inside: bool = False, optimizer: bool = False) -> bool:
        """Return True if nothing of an entry can be selected, so that it need not be storable.

        Tensors `inside` have keys of their own, and so do the states of an `optimizer`, with a slash.
        """
        if self.choice.selects_entry(name):
            return False
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.choice.ignore):
            return True
        if optimizer:
            return not any(set(pattern) & set("/*?[") or pattern == "param_groups" for pattern in self.choice.only)
        return not inside

    def apply(self, collected: Collected) -> Collected:
        """Return the selected part of a rank's state; tensors of stateful objects follow their entry."""
        keys = _GroupKeys.of(collected)
        chosen = [
            self._selects(keys, item.group, item.outer or item.key, item.role == "parameter")
            for item in collected.items
        ]
        items = [item for item, is_chosen in zip(collected.items, chosen, strict=True) if is_chosen]
        optimizers = {name: self._optimizer(name, entry, items) for name, entry in collected.optimizers.items()}
        trees = {name: self._tree(collected.tree_kinds[name], name, tree) for name, tree in collected.trees.items()}
        out = replace(
            collected,
            items=items,
            fixed=sum(chosen[: collected.fixed]),
            optimizers={name: entry for name, entry in optimizers.items() if entry is not None},
            trees={name: tree for name, tree in trees.items() if tree is not None},
        )
        kept = {item.group for item in items} | out.optimizers.keys() | out.trees.keys()
        known = {item.group for item in collected.items}
        # A module without tensors on this rank, such as a pipeline stage, is selected by its name.
        kept |= {name for name in collected.kinds.keys() - known if self.choice.selects_entry(name)}
        out.kinds = {name: kind for name, kind in collected.kinds.items() if name in kept}
        out.tree_kinds = {name: kind for name, kind in collected.tree_kinds.items() if name in out.trees}
        out.aliases = {
            group: {alias: key for alias, key in ties.items() if self._selects(keys, group, key)}
            for group, ties in collected.aliases.items()
            if group in kept
        }
        out.subclasses = {
            group: {key: found for key, found in descriptions.items() if self._selects(keys, group, key)}
            for group, descriptions in collected.subclasses.items()
            if group in kept
        }
        adapters = any(collected.kinds.get(group) in (ADAPTER, BASE) for group in self.incomplete)
        files = {} if adapters else collected.files  # the configs of a PEFT model describe all of its groups
        out.files = {name: data for name, data in files.items() if _owner(name) not in self.incomplete}
        out.plans = {name: plan for name, plan in collected.plans.items() if name in kept}
        return out

    def survey(self, collected: Collected) -> RankSelection:
        """Return what the ranks exchange before the first save of a layout."""
        keys = _GroupKeys.of(collected)
        out = self.apply(collected)
        incomplete = {group for group in collected.left_out if keys.kinds[group] in _DESCRIBED} | {
            item.group
            for item in collected.items
            if keys.kinds[item.group] in _DESCRIBED and not self._selects(keys, item.group, item.outer or item.key)
        }
        states = (self._selects(keys, group, key) for group, key in _states_to_come(collected, self._unused()))
        is_empty = not out.items and not out.optimizers and not out.trees
        is_empty = not any(list(states)) and is_empty
        return RankSelection(sorted(self.choice.used), sorted(incomplete), is_empty)

    def settle(self, answers: Iterable[RankSelection]) -> None:
        """Use the answers of all ranks; raises Mismatch, alike on every rank, if a pattern fits nothing."""
        answers = list(answers)
        used = {pattern for answer in answers for pattern in answer.used}
        unused = [pattern for pattern in (*self.choice.only, *self.choice.ignore) if pattern not in used]
        if unused:
            raise Mismatch(
                f"nothing was saved: the pattern {unused[0]!r} fits no key of the state; a pattern fits a key such as "
                "'layers.*', 'group/key', or a whole entry of the state such as 'model'"
            )
        if all(answer.is_empty for answer in answers):
            raise InvalidArgument("only= and ignore= leave nothing to save")
        self.incomplete = frozenset(name for answer in answers for name in answer.incomplete)

    def selects(self, kinds: Mapping[str, str], aliases: Mapping[str, Mapping[str, str]], group: str, key: str) -> bool:
        """Return True if a tensor of any rank is selected, given the kinds and ties of all groups."""
        return self._decide(_GroupKeys(kinds, _inverted(aliases)), group, key)  # not kept: ties may still be added

    def _unused(self) -> list[str]:
        return [pattern for pattern in (*self.choice.only, *self.choice.ignore) if pattern not in self.choice.used]

    def _selects(self, keys: _GroupKeys, group: str, key: str, rounded: bool = False) -> bool:
        name = (group, key, rounded)
        known = self._decisions.get(name)
        if known is None:
            known = self._decisions[name] = self._decide(keys, group, key, rounded)
        return known

    def _decide(self, keys: _GroupKeys, group: str, key: str, rounded: bool = False) -> bool:
        if keys.kinds.get(group) == "masters":
            module = keys.module_of(group)
            others = keys.names.get(module, {}).get(key, ())
            # Masters beside a rounded model are the weights of the model.
            is_whole = not rounded or self.choice.selects(module, key, *others)
            return is_whole and self.choice.selects_master(module, key)
        if keys.kinds.get(group) == "stateful":
            return self.choice.selects_entry(group)
        return self.choice.selects(group, key, *keys.names.get(group, {}).get(key, ()))

    def _optimizer(self, name: str, entry: Mapping[str, Any], items: Sequence[SaveItem]) -> dict[str, Any] | None:
        """Return the selected part of an optimizer's entry; None if nothing of it is selected."""
        options = self.choice.selects(name, "param_groups")
        stateless = [key for key in entry["stateless"] if self.choice.selects(name, f"{key}/*")]
        scalars: dict[str, dict[str, Any]] = {}
        for key, states in entry["scalars"].items():
            chosen = {state: value for state, value in states.items() if self._selects_state(name, key, value)}
            scalars |= {key: chosen} if chosen else {}
        has_tensors = any(item.group == name for item in items)
        if not (options or stateless or scalars or has_tensors or self.choice.selects_entry(name)):
            return None
        groups = entry["groups"] if options else [{**group, "options": {}} for group in entry["groups"]]
        return {**entry, "groups": groups, "stateless": stateless, "scalars": scalars}

    def _selects_state(self, name: str, key: str, encoded: Any) -> bool:
        return all(self.choice.selects(name, label) for label in references(encoded) or (f"{key}/*",))

    def _tree(self, kind: str, name: str, tree: Tree) -> Tree | None:
        """Return the selected part of an entry with values; None if it is not selected."""
        if kind == "module":
            value = {key: item for key, item in tree.value.items() if self.choice.selects(name, key)}
            owned = {path: next((key for key in tree.value if _is_under(path, key)), "") for path in tree.tensors}
            return Tree(value, {p: t for p, t in tree.tensors.items() if owned[p] in value}) if value else None
        if not self.choice.selects_entry(name):
            return None
        if kind != "tensors":
            return tree
        found = references(tree.value)
        left = [key for key in found if not self.choice.selects(name, key)]
        return Tree(without_references(tree.value, left), tree.tensors) if left else tree


@dataclass(frozen=True, slots=True)
class _GroupKeys:
    """The kinds of the groups, and the other names of each tied key by group."""

    kinds: Mapping[str, str]
    names: Mapping[str, Mapping[str, Sequence[str]]]

    @staticmethod
    def of(collected: Collected) -> _GroupKeys:
        # The averages of a module are loaded by the keys that they have themselves.
        averages = tuple(f"{name}/" for name, kind in collected.tree_kinds.items() if kind == "averages")
        own = {group: ties for group, ties in collected.aliases.items() if not group.startswith(averages)}
        return _GroupKeys(collected.kinds, _inverted(own))

    def module_of(self, group: str) -> str:
        return next((name for name in self.kinds if masters_group(name) == group), "model")


def _inverted(aliases: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, list[str]]]:
    out: dict[str, dict[str, list[str]]] = {}
    for group, ties in aliases.items():
        for alias, key in ties.items():
            out.setdefault(group, {}).setdefault(key, []).append(alias)
    return out


def _owner(file: str) -> str:
    """Return the group of a model that a config file describes: its folder, or "model"."""
    folder, _, _ = file.rpartition("/")
    return f"{folder}/model" if folder else "model"


def _is_under(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _states_to_come(collected: Collected, patterns: Sequence[str]) -> Iterable[tuple[str, str]]:
    """Yield states that optimizers have not created yet, by group and key, for patterns that match nothing so far.

    A pattern for the states of an optimizer is right before its first step, too. Of an optimizer whose state names
    are not known, any name may come.
    """
    tails = {pattern.rpartition("/")[2] for pattern in patterns if "/" in pattern}
    for name, optimizer in collected.live_optimizers.items() if tails else ():
        if name not in collected.optimizers:
            continue
        with_state = {item.key.rpartition("/")[0] for item in collected.items if item.group == name}
        params = [key for group in collected.optimizers[name]["groups"] for key in group["params"]]
        for key in params:
            if key not in with_state:
                yield from ((name, f"{key}/{state}") for state in state_names(inner_optimizer(optimizer)) or tails)
