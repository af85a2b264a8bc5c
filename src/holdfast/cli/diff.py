"""`holdfast diff`: compare keys, shapes, dtypes and values of two checkpoints, tensors and state.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.render import clean, count, open_path, print_json
from holdfast.cli.steps import CheckpointPath, step_option
from holdfast.core.errors import NotFound
from holdfast.core.names import natural_key
from holdfast.core.terminal import progress_bar
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


@click.command("diff", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("first", type=CheckpointPath())
@click.argument("second", type=CheckpointPath())
@step_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--group", "chosen", multiple=True, help="Compare this group only; may be given more than once.")
def command(first: str, second: str, as_json: bool, chosen: tuple[str, ...]) -> None:
    """Compare the checkpoints FIRST and SECOND, regardless of the meshes that wrote them.

    Exit code 0 if the contents are equal, 1 if they differ. Files with equal recorded digests
    are not read. Use `holdfast verify` to check their bytes.

    \b
    holdfast diff runs/a/step-40 runs/a/step-50     two steps of a run
    holdfast diff runs/a runs/b --step 40           the same step of two runs
    holdfast diff runs/a runs/b --group model       the newest steps, only the model
    """
    one, two = open_path(first), open_path(second)
    groups = list(dict.fromkeys([*one.groups, *two.groups]))
    unknown = [name for name in chosen if name not in groups]
    if unknown:
        raise NotFound(f"neither checkpoint has a group {unknown[0]!r}; the groups are {', '.join(groups)}")
    with progress_bar("comparing", one.manifest.total_bytes) as advance:
        differences = [*_compare(one, two, chosen or groups, advance)]
        if not chosen:
            differences += _compare_state(one, two)
    if as_json:
        print_json({"same": not differences, "differences": [asdict(difference) for difference in differences]})
    else:
        for difference in differences:
            click.echo(_format(difference))
        click.echo("the same" if not differences else count(len(differences), "difference"))
    raise click.exceptions.Exit(1 if differences else 0)


def _format(difference: Difference) -> str:
    text = f"{difference.group}: {difference.key}: {difference.what}"
    if difference.first is not None:
        text += f": {difference.first} against {difference.second}"
    if difference.elements is not None:
        text += f": {count(difference.elements, 'element')}"
        if difference.max_abs is not None:
            text += f", max |difference| {difference.max_abs:.6g}, mean {difference.mean_abs:.6g}"
    return clean(text)


def _compare(
    one: Checkpoint, two: Checkpoint, groups: Iterable[str], advance: Callable[[int], None]
) -> Iterator[Difference]:
    for group in groups:
        for checkpoint, other in ((one, "second"), (two, "first")):
            if group not in checkpoint.groups:
                yield Difference(group, "*", f"the group is only in the {other}")
        if group in one.groups and group in two.groups:
            yield from _compare_group(one, two, group, advance)


def _compare_state(one: Checkpoint, two: Checkpoint) -> Iterator[Difference]:
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
    """Yield the differences of two values of state.json, field by field."""
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
    elif one != two or type(one) is not type(two):
        texts = [strictjson.dumps(value).decode() for value in (one, two)]
        first, second = (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..." for text in texts)
        yield Difference("state.json", path, "the value differs", first, second)


def _ordered(entry: Any) -> Any:
    """Sort the parameter lists of an optimizer's entry in state.json, because their order has no meaning."""
    if not isinstance(entry, dict) or entry.get("kind") != "optimizer":
        return entry
    groups = [group | {"params": sorted(group["params"], key=str)} for group in entry["groups"]]
    return entry | {"groups": groups, "stateless": sorted(entry.get("stateless", ()), key=str)}


def _compare_group(
    one: Checkpoint, two: Checkpoint, group: str, advance: Callable[[int], None]
) -> Iterator[Difference]:
    same_files = {
        name
        for name in one.manifest.groups[group].files
        if one.manifest.files[name].blocks and one.manifest.files.get(name) == two.manifest.files.get(name)
    }
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
