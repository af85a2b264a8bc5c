"""Find the optimizer states of a Paddle checkpoint that are transposed, by shapes, values and similar layers.

Paddle stores a Linear's weight, master weight and moments as [in, out]. The model's files may have been
transposed to [out, in] for other tools. Shapes show which, unless a matrix is square. Then the values of
its master weight decide, then the same matrix in other layers, then the rest of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from holdfast.core.errors import Mismatch, Unsupported

Shape = tuple[int, ...]
Order = tuple[int, ...]

_NUMBERS = re.compile(r"[0-9]+")
_NEVER_TRANSPOSED = re.compile(r"embed|lm_head|lora|norm|\bwte\b|\bwpe\b|position", re.IGNORECASE)
_TRIED = 4


def transposed_orders(
    parameters: Mapping[str, Shape],
    states: Mapping[str, Shape],
    by_value: Callable[[str], bool | None],
    by_default: Callable[[], bool],
) -> dict[str, Order]:
    """Return the order of dims of the states, for each parameter whose states are transposed.

    `by_value` returns whether a square matrix's master weight is transposed, None if its values do not show
    it. `by_default` decides for a folder in which nothing else does.
    """
    order_by_key = {key: _by_shape(key, parameters[key], shape) for key, shape in states.items() if key in parameters}
    orders = {key: order for key, order in order_by_key.items() if order is not None and _is_transposed(order)}
    evidence = {
        key: _is_transposed(order) for key, order in order_by_key.items() if order is not None and len(order) == 2
    }
    roles = _by_role(evidence)
    open_roles: dict[str, list[str]] = {}
    for key, order in order_by_key.items():
        if order is None:
            open_roles.setdefault(_role(key), []).append(key)
    for role, keys in open_roles.items():
        transposed = _first_by_value(keys, by_value)
        if transposed is None:
            transposed = roles.get(role)
        elif roles.get(role, transposed) != transposed:
            raise Mismatch(
                f"{keys[0]}: the values of its master weight contradict the shapes of the same matrix elsewhere"
            )
        if transposed is None:
            transposed = _by_similar(keys[0], evidence, by_default)
        if transposed:
            orders |= dict.fromkeys(keys, (1, 0))
    return orders


def _by_shape(key: str, parameter: Shape, state: Shape) -> Order | None:
    """Return the order of a state's dims that gives its parameter's shape; None if both orders fit."""
    straight = tuple(range(len(parameter)))
    if len(parameter) == 2 and parameter == state and parameter[0] == parameter[1] > 1:
        return (0, 1) if _NEVER_TRANSPOSED.search(key) else None
    if parameter == state:
        return straight
    if len(parameter) in (2, 3) and state == (*parameter[:-2], parameter[-1], parameter[-2]):
        return (*straight[:-2], straight[-1], straight[-2])
    raise Unsupported(
        f"{key}: its states have the shape {list(state)}, the parameter has {list(parameter)}; they are shards of "
        "ranks, which only the model's code can merge: save with a merged optimizer "
        "(without ignore_merge_optimizer, or with gather_split_param)"
    )


def _is_transposed(order: Order) -> bool:
    return order != tuple(range(len(order)))


def _role(key: str) -> str:
    """Return a name that is the same for this matrix in every layer."""
    return _NUMBERS.sub("*", key)


def _by_role(evidence: Mapping[str, bool]) -> dict[str, bool]:
    first: dict[str, str] = {}
    for key, transposed in evidence.items():
        other = first.setdefault(_role(key), key)
        if evidence[other] != transposed:
            raise Mismatch(f"the states of {key} and {other} are transposed differently relative to their parameters")
    return {role: evidence[key] for role, key in first.items()}


def _first_by_value(keys: Iterable[str], by_value: Callable[[str], bool | None]) -> bool | None:
    """Return what the values of the first few keys show. Raises Mismatch if they disagree."""
    by_layout: dict[bool, str] = {}
    for key in list(keys)[:_TRIED]:
        transposed = by_value(key)
        if transposed is not None:
            by_layout.setdefault(transposed, key)
    if len(by_layout) == 2:
        raise Mismatch(f"the master weights of {by_layout[True]} and {by_layout[False]} are transposed differently")
    return next(iter(by_layout), None)


def _by_similar(key: str, evidence: Mapping[str, bool], by_default: Callable[[], bool]) -> bool:
    """Decide for a square matrix without evidence: like matrices of the same name, like the folder, or the default."""
    last = key.rsplit(".", 2)[-2:]
    named = {transposed for other, transposed in evidence.items() if other.rsplit(".", 2)[-2:] == last}
    if len(named) == 1:
        return named.pop()
    others = {transposed for other, transposed in evidence.items() if not _NEVER_TRANSPOSED.search(other)}
    return True in others if others else by_default()
