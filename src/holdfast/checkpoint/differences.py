"""The differences of two checkpoints: keys, shapes, dtypes and values of tensors, base models, state.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import HoldfastError
from holdfast.core.names import natural_key
from holdfast.format import strictjson

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpoint import Checkpoint

_LISTED = 3  # values of a list that differ, each on a line of its own
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference. `max_abs` and `mean_abs` cover finite values only; `elements` counts all that differ."""

    group: str
    key: str
    what: str
    first: str | None = None
    second: str | None = None
    max_abs: float | None = None
    mean_abs: float | None = None
    elements: int | None = None


def compare_groups(
    one: Checkpoint, two: Checkpoint, groups: Iterable[str], advance: Callable[[int], None]
) -> Iterator[Difference]:
    """Yield the differences of the tensors of some groups. Files with equal recorded digests are not read."""
    for group in groups:
        for checkpoint, other in ((one, "second"), (two, "first")):
            if group not in checkpoint.groups:
                yield Difference(group, "*", f"the group is only in the {other}")
        if group in one.groups and group in two.groups:
            yield from _compare_group(one, two, group, advance)


def compare_state(one: Checkpoint, two: Checkpoint) -> Iterator[Difference]:
    """Yield the differences of what is in no group: base models and state.json."""
    yield from _compare_bases(one.manifest.bases, two.manifest.bases)
    for name in sorted({*one.state, *two.state}):
        yield from _compare_values(name, *(_ordered(c.state.get(name)) for c in (one, two)))


def _compare_bases(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the modules whose adapters refer to different base models, wherever these are."""
    for name in sorted(one.keys() & two.keys()):
        first, second = one[name], two[name]
        if "reference" in (first["mode"], second["mode"]) and first.get("files") != second.get("files"):
            sources = [base.get("source", base["mode"]) for base in (first, second)]
            yield Difference("base model", name, "the base model differs", *sources)
        ways = [base.get("quantized") for base in (first, second)]
        if None not in ways and ways[0] != ways[1]:
            one_text, two_text = (", ".join(kinds) or "not quantized" for kinds in ways)
            yield Difference("base model", name, "the quantization of the base model differs", one_text, two_text)


def _compare_values(path: str, one: Any, two: Any) -> Iterator[Difference]:
    """Yield the differences of two values of state.json, field by field; a text that is JSON counts as its value."""
    if isinstance(one, str) and isinstance(two, str) and one != two:
        one, two = _parsed(one, two)
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys([*one, *two]):
            yield from _compare_values(f"{path}.{key}", one.get(key), two.get(key))
    elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
        differing = [index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
        if len(differing) > _LISTED and not any(isinstance(one[index], dict | list) for index in differing):
            yield Difference(
                "state.json", path, f"{len(differing)} of {len(one)} values differ", elements=len(differing)
            )
            return
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from _compare_values(f"{path}[{index}]", a, b)
    elif isinstance(one, list) and isinstance(two, list) and any(isinstance(entry, dict) for entry in [*one, *two]):
        yield Difference("state.json", path, "the number of entries differs", str(len(one)), str(len(two)))
        for index, (a, b) in enumerate(zip(one, two, strict=False)):
            yield from _compare_values(f"{path}[{index}]", a, b)
    elif one != two or type(one) is not type(two):
        texts = [strictjson.dumps(value).decode() for value in (one, two)]
        first, second = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in texts)
        yield Difference("state.json", path, "the value differs", first, second)


def _parsed(one: str, two: str) -> tuple[Any, Any]:
    """Return the values of two texts if both are JSON arrays or objects that differ, else the texts."""
    try:
        values = strictjson.loads(one.encode(), "the first"), strictjson.loads(two.encode(), "the second")
    except HoldfastError:
        return one, two
    is_nested = all(isinstance(value, dict | list) for value in values)
    return values if is_nested and values[0] != values[1] else (one, two)


def _ordered(entry: Any) -> Any:
    """Sort the parameter lists of an optimizer's entry in state.json, because their order has no meaning."""
    if not isinstance(entry, dict) or entry.get("kind") != "optimizer":
        return entry
    groups = [group | {"params": sorted(group["params"], key=str)} for group in entry["groups"]]
    return entry | {"groups": groups, "stateless": sorted(entry.get("stateless", ()), key=str)}


def equal_files(one: Checkpoint, two: Checkpoint, group: str) -> set[str]:
    """Return the files of a group that have the same name and digests in both checkpoints."""
    return {
        name
        for name in one.manifest.groups[group].files
        if one.manifest.files[name].blocks and one.manifest.files.get(name) == two.manifest.files.get(name)
    }


def _compare_group(
    one: Checkpoint, two: Checkpoint, group: str, advance: Callable[[int], None]
) -> Iterator[Difference]:
    same_files = equal_files(one, two, group)
    # Stored keys only: listing a tied key as an alias is not a difference in content.
    ones, twos = (c.contents.groups[group] for c in (one, two))
    first, second = (dict.fromkeys([*members.tensors, *members.aliases]) for members in (ones, twos))
    for key in ones.tensors:
        if key not in second:
            yield Difference(group, key, "only in the first")
    for key in twos.tensors:
        if key not in first:
            yield Difference(group, key, "only in the second")
    for key in sorted((key for key in first if key in second), key=natural_key):
        a, b = one.find(key, group), two.find(key, group)
        advance(a.bytes)
        if a == b and all(place.file in same_files for place in a.recipe.sources()):
            continue
        yield from _compare_tensor(one, two, group, key)


def _compare_tensor(one: Checkpoint, two: Checkpoint, group: str, key: str) -> Iterator[Difference]:
    facts: list[tuple[str, tuple[int, ...]]] = []
    for checkpoint in (one, two):
        tensor = checkpoint.find(key, group)
        facts.append((tensor.logical, tensor.logical_shape))
    (dtype_a, shape_a), (dtype_b, shape_b) = facts
    if dtype_a != dtype_b:
        yield Difference(group, key, "the dtype differs", dtype_a, dtype_b)
    if shape_a != shape_b:
        yield Difference(group, key, "the shape differs", str(list(shape_a)), str(list(shape_b)))
        return
    a, b = one.read(key, group), two.read(key, group)
    if dtype_a == dtype_b and a.tobytes() == b.tobytes():
        return
    difference = _value_difference(group, key, a, b, same_dtype=dtype_a == dtype_b)
    if difference is not None:
        yield difference


def _value_difference(group: str, key: str, a: Any, b: Any, *, same_dtype: bool) -> Difference | None:
    import numpy as np

    if a.dtype.kind in "iub" and a.dtype.itemsize == 8:
        wide: Any = np.longdouble  # 64-bit integers do not fit into a double
    else:
        wide = np.complex128 if a.dtype.kind == "c" or b.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    if same_dtype:
        raw = np.dtype(f"V{a.dtype.itemsize}")
        unequal = np.ascontiguousarray(a).view(raw) != np.ascontiguousarray(b).view(raw)
    else:
        unequal = (x != y) & ~(np.isnan(x) & np.isnan(y))
    count = int(np.count_nonzero(unequal))
    if not count:
        return None
    finite = np.isfinite(x) & np.isfinite(y)
    gaps = np.abs(x[finite] - y[finite])
    largest = float(gaps.max()) if gaps.size else None
    mean = float(gaps.mean()) if gaps.size else None
    return Difference(group, key, "values differ", max_abs=largest, mean_abs=mean, elements=count)
