"""Retention policies as values (last, every, best, newer_than): rules, parsing, JSON; checks of saved metrics.

    keep=holdfast.keep.last(3) | holdfast.keep.every(1000) | holdfast.keep.best(2, "loss")

`|` keeps every checkpoint that either policy keeps. The newest checkpoint and tagged checkpoints are always kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from holdfast.core.durations import Duration, parse_seconds
from holdfast.core.errors import InvalidArgument


class StepProperties(Protocol):
    """The properties of a step that rules use: a manifest, or its summary."""

    @property
    def step(self) -> int | None: ...

    @property
    def created(self) -> str: ...

    @property
    def metrics(self) -> Mapping[str, float | None]: ...


@dataclass(frozen=True, slots=True)
class Policy:
    """A retention policy: a list of rules, each a name and its arguments."""

    rules: tuple[tuple[str, tuple[Any, ...]], ...]

    def __or__(self, other: object) -> Policy:
        if not isinstance(other, Policy):
            return NotImplemented
        return Policy((*self.rules, *other.rules))

    def __str__(self) -> str:
        return " | ".join(f"{name}({', '.join(map(repr, arguments))})" for name, arguments in self.rules)

    def kept(self, manifests: Sequence[StepProperties], now: datetime | None = None) -> dict[int, list[str]]:
        """Return the steps to keep, each with the rules that keep it."""
        ordered = sorted(manifests, key=lambda manifest: manifest.step or 0)
        kept: dict[int, list[str]] = {}
        for name, arguments in self.rules:
            rule = str(Policy(((name, arguments),)))
            for step in _RULES[name](ordered, now or datetime.now(UTC), *arguments):
                kept.setdefault(step, []).append(rule)
        return kept

    def fields(self) -> list[list[Any]]:
        """Return the JSON form."""
        return [[name, list(arguments)] for name, arguments in self.rules]

    @staticmethod
    def from_fields(fields: Sequence[Sequence[Any]]) -> Policy:
        """Create a policy from its JSON form; raises InvalidArgument if it is invalid."""
        if not fields:
            raise InvalidArgument("a retention policy needs at least one rule")
        try:
            made = [_MAKERS[name](*arguments) for name, arguments in fields]
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(f"not a retention policy: {str(fields)[:80]} ({error})") from None
        return Policy(tuple(rule for policy in made for rule in policy.rules))


def last(count: int) -> Policy:
    """Keep the newest `count` steps."""
    return Policy((("last", (_whole("last", count),)),))


def every(steps: int) -> Policy:
    """Keep every step that is a multiple of `steps`."""
    return Policy((("every", (_whole("every", steps),)),))


def best(count: int, metric: str, mode: str = "min") -> Policy:
    """Keep the `count` steps with the best `metric`, as passed to `save(step, state, metrics={...})`.

    If no step has the metric, every step is kept, because the name may be misspelled.
    """
    if mode not in ("min", "max"):
        raise InvalidArgument(f"mode={mode!r}: choose 'min' or 'max'")
    if not isinstance(metric, str) or not metric or set(metric) & set(",|()'\""):
        raise InvalidArgument(f"metric={metric!r} is not a valid metric name")
    return Policy((("best", (_whole("best", count), metric, mode)),))


def newer_than(duration: Duration) -> Policy:
    """Keep steps written less than a duration ago: seconds, a timedelta, or a string such as "36h" or "2d"."""
    return Policy((("newer_than", (parse_seconds(duration, "newer_than"),)),))


def parse(text: str) -> Policy:
    """Parse a policy from its `str` form: "last(3) | every(1000) | best(2, 'loss', 'min')"."""
    rules: list[Policy] = []
    for part in text.split("|"):
        match = re.fullmatch(r"\s*([a-z_]+)\(([^()]*)\)\s*", part)
        if match is None or match[1] not in _MAKERS:
            raise InvalidArgument(
                f"{part.strip()!r} is not a rule: write {', '.join(f'{name}(...)' for name in _MAKERS)}, joined with |"
            )
        try:
            rules.append(_MAKERS[match[1]](*(_argument(text) for text in match[2].split(","))))
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"{part.strip()}: {error}") from None
    policy = rules[0]
    for rule in rules[1:]:
        policy |= rule
    return policy


def _argument(text: str) -> Any:
    text = text.strip()
    if re.fullmatch(r"[0-9]+", text):
        return int(text)
    if re.fullmatch(r"[0-9.]+", text):
        return float(text)
    return text.strip("'\"")


def check_metrics(metrics: Any) -> dict[str, float | None]:
    """Return metrics as they are stored: plain numbers by name, None for values that are not finite."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidArgument(f"metrics={metrics!r} must map names to numbers, such as {{'loss': 2.31}}")
    out: dict[str, float | None] = {}
    for name, value in metrics.items():
        if value is None:  # the stored form of a value that is not finite
            out[str(name)] = None
            continue
        if not isinstance(name, str) or not name or isinstance(value, bool | str):
            raise InvalidArgument(f"the metric {name!r} is {value!r}; metrics need a name and a number")
        try:
            number = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the metric {name!r} is a {type(value).__name__}, not a number: {error}") from None
        out[name] = number if math.isfinite(number) else None
    return out


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name}({value!r}): the argument must be an integer of at least 1")
    return value


def _last(manifests: Sequence[StepProperties], now: datetime, count: int) -> list[int]:
    return [manifest.step or 0 for manifest in manifests[-count:]]


def _every(manifests: Sequence[StepProperties], now: datetime, steps: int) -> list[int]:
    return [manifest.step for manifest in manifests if manifest.step is not None and manifest.step % steps == 0]


def _best(manifests: Sequence[StepProperties], now: datetime, count: int, metric: str, mode: str) -> list[int]:
    measured = []
    for manifest in manifests:
        value = signed_metric(manifest, metric, mode)
        if value is not None:
            measured.append((value, -(manifest.step or 0)))
    if not measured:
        return [manifest.step or 0 for manifest in manifests]  # no step has the metric: keep all
    return [-step for _, step in sorted(measured)[:count]]


def signed_metric(manifest: StepProperties, metric: str, mode: str) -> float | None:
    """Return a metric with its sign set so that less is better; None for a step without a finite value."""
    value = manifest.metrics.get(metric)
    return None if value is None else value if mode == "min" else -value


def _newer_than(manifests: Sequence[StepProperties], now: datetime, seconds: float) -> list[int]:
    return [manifest.step or 0 for manifest in manifests if is_newer_than(manifest, now, seconds)]


def is_newer_than(manifest: StepProperties, now: datetime, seconds: float) -> bool:
    """Return True if a step was written less than `seconds` before `now`."""
    return _created(manifest) >= now - timedelta(seconds=seconds)


def _created(manifest: StepProperties) -> datetime:
    try:
        created = datetime.fromisoformat(manifest.created)
    except ValueError:
        return datetime.max.replace(tzinfo=UTC)  # an unknown date counts as new
    return created if created.tzinfo else created.replace(tzinfo=UTC)


_RULES: Mapping[str, Callable[..., list[int]]] = {
    "last": _last,
    "every": _every,
    "best": _best,
    "newer_than": _newer_than,
}
_MAKERS: Mapping[str, Callable[..., Policy]] = {"last": last, "every": every, "best": best, "newer_than": newer_than}
