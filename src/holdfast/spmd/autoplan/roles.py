"""Roles: modules that are built alike and numbered in a row share one name, so that they are planned once."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from torch import nn


def roles_of(model: nn.Module) -> dict[str, str]:
    """Return the role of every module by its name.

    A number in a name becomes `*` if all numbered siblings are built alike, and otherwise the numbers of its own kind,
    as in `[1-3]`. A module in several places has its first name, as in torch.
    """
    names = {module: name for name, module in model.named_modules()}
    roles: dict[str, str] = {}
    _name(model, "", names, roles, {})
    return roles


def _name(
    module: nn.Module, role: str, names: Mapping[nn.Module, str], roles: dict[str, str], seen: dict[int, Hashable]
) -> None:
    name = names[module]
    roles[name] = role
    children = dict(module.named_children())
    for child, part in _parts(children, seen).items():
        if names[children[child]] == (f"{name}.{child}" if name else child):
            _name(children[child], f"{role}.{part}" if role else part, names, roles, seen)


def _parts(children: Mapping[str, nn.Module], seen: dict[int, Hashable]) -> dict[str, str]:
    """Return the name of each child in a role."""
    kinds: dict[Hashable, list[str]] = {}
    for name, child in children.items():
        if name.isdecimal():
            kinds.setdefault(_build(child, seen), []).append(name)
    parts = {name: name for name in children}
    for alike in kinds.values():
        if len(alike) > 1:
            word = "*" if len(kinds) == 1 else f"[{_ranges([int(name) for name in alike])}]"
            parts |= dict.fromkeys(alike, word)
    return parts


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if first != last else f"{first}" for first, last in runs)


def _build(module: nn.Module, seen: dict[int, Hashable]) -> Hashable:
    """Return what makes two modules alike: their classes and the shapes of their parameters, recursively."""
    if id(module) not in seen:
        own = tuple((key, tuple(p.shape), p.dtype) for key, p in module.named_parameters(recurse=False))
        below = tuple((key, _build(child, seen)) for key, child in module.named_children())
        seen[id(module)] = (type(module), own, below)
    return seen[id(module)]
