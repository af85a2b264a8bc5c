"""Which states of a Paddle checkpoint lie turned against their parameters.

Paddle keeps a Linear's weight as [in, out], and its masters and moments with it; the model's
files may have been turned to [out, in] for others to read. Shapes tell which, unless a matrix is
square: then its master's values tell, then its likes in other layers, then the rest of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from holdfast.core.errors import Mismatch, Unsupported

Shape = tuple[int, ...]
Order = tuple[int, ...]

_NUMBERS = re.compile(r"[0-9]+")
_NEVER_TURNED = re.compile(r"embed|lm_head|lora|norm|\bwte\b|\bwpe\b|position", re.IGNORECASE)
_TRIED = 4


def turns(
    parameters: Mapping[str, Shape],
    states: Mapping[str, Shape],
    by_value: Callable[[str], bool | None],
    by_default: Callable[[], bool],
) -> dict[str, Order]:
    """The order of dims in which states are taken, for each parameter whose states lie turned.

    `by_value` says whether a square matrix's master is turned, None if its values do not tell;
    `by_default` says it for a folder in which nothing else does.
    """
    told = {key: _by_shape(key, parameters[key], shape) for key, shape in states.items() if key in parameters}
    orders = {key: order for key, order in told.items() if order is not None and _is_turn(order)}
    evidence = {key: _is_turn(order) for key, order in told.items() if order is not None and len(order) == 2}
    roles = _by_role(evidence)
    open_roles: dict[str, list[str]] = {}
    for key, order in told.items():
        if order is None:
            open_roles.setdefault(_role(key), []).append(key)
    for role, keys in open_roles.items():
        turned = _first_told(keys, by_value)
        if turned is None:
            turned = roles.get(role)
        elif roles.get(role, turned) != turned:
            raise Mismatch(f"{keys[0]}: its master's values say another layout than the shapes of its likes do")
        if turned is None:
            turned = _by_likes(keys[0], evidence, by_default)
        if turned:
            orders |= dict.fromkeys(keys, (1, 0))
    return orders


def _by_shape(key: str, parameter: Shape, state: Shape) -> Order | None:
    """The order in which a state's dims make up its parameter's; None if both ways fit."""
    straight = tuple(range(len(parameter)))
    if len(parameter) == 2 and parameter == state and parameter[0] == parameter[1] > 1:
        return (0, 1) if _NEVER_TURNED.search(key) else None
    if parameter == state:
        return straight
    if len(parameter) in (2, 3) and state == (*parameter[:-2], parameter[-1], parameter[-2]):
        return (*straight[:-2], straight[-1], straight[-2])
    raise Unsupported(
        f"{key}: its states have the shape {list(state)}, the parameter has {list(parameter)}; they are parts of "
        "ranks, and how these join is known to the model's code alone: save with a merged optimizer "
        "(without ignore_merge_optimizer, or with gather_split_param)"
    )


def _is_turn(order: Order) -> bool:
    return order != tuple(range(len(order)))


def _role(key: str) -> str:
    """The same for the same matrix of every layer."""
    return _NUMBERS.sub("*", key)


def _by_role(evidence: Mapping[str, bool]) -> dict[str, bool]:
    first: dict[str, str] = {}
    for key, turned in evidence.items():
        other = first.setdefault(_role(key), key)
        if evidence[other] != turned:
            raise Mismatch(f"the states of {key} and of {other} lie in different layouts against their parameters")
    return {role: evidence[key] for role, key in first.items()}


def _first_told(keys: Iterable[str], by_value: Callable[[str], bool | None]) -> bool | None:
    """What the values of the first few say; raises Mismatch where they do not say the same."""
    said: dict[bool, str] = {}
    for key in list(keys)[:_TRIED]:
        turned = by_value(key)
        if turned is not None:
            said.setdefault(turned, key)
    if len(said) == 2:
        raise Mismatch(f"the masters of {said[True]} and of {said[False]} lie in different layouts")
    return next(iter(said), None)


def _by_likes(key: str, evidence: Mapping[str, bool], by_default: Callable[[], bool]) -> bool:
    """A square matrix about which nothing is known: as those with its name, as the folder's, or as it says."""
    last = key.rsplit(".", 2)[-2:]
    named = {turned for other, turned in evidence.items() if other.rsplit(".", 2)[-2:] == last}
    if len(named) == 1:
        return named.pop()
    others = {turned for other, turned in evidence.items() if not _NEVER_TURNED.search(other)}
    return True in others if others else by_default()
