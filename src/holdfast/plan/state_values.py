"""Merge the non-tensor values of all ranks into one state.json: trees, optimizers, split dicts, files, plans.

A rank reports each of its values as a `RankValue`. Ranks whose values were equal at planning time
do not repeat them: they send the digest and the number of the first such rank, the reporter.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import LayoutError
from holdfast.core.names import natural_key
from holdfast.format import strictjson
from holdfast.format.digest import Digest
from holdfast.layout.coordinates import axis_sizes, coordinate_on, label
from holdfast.layout.placement import Mesh
from holdfast.plan.subclass_keys import SUBCLASSES, merge_descriptions

TREE, SPLIT_DICT, OPTIMIZER = "tree", "dealt", "optimizer"
FILE, EXTRA, PLAN, BASE_MODEL, PROGRAM_FILE = "file", "extra", "plan", "base", "program"
_NOT_ENTRIES = (FILE, EXTRA, PLAN, BASE_MODEL, PROGRAM_FILE)
_ABSENT = object()


class ValuesChanged(LayoutError):
    """Values that were equal on several ranks at planning time differ now: the save must be planned again."""


@dataclass(frozen=True, slots=True)
class RankValue:
    """One value of one rank: its kind and content. Equal digests mean equal values, including tensors."""

    kind: str
    content: Any
    digest: str
    text: bytes = b""  # the content as JSON, if it was encoded for the digest

    @staticmethod
    def of(kind: str, content: Any, extra: str = "") -> RankValue:
        text = strictjson.dumps(content)
        digest = Digest()
        for part in (kind.encode(), b"\0", extra.encode(), b"\0", text):
            digest.update(part)
        return RankValue(kind, content, digest.hexdigest(), text)


Reporters = Mapping[str, int]  # the first rank with the same value, by name


def value_fields(values: Mapping[str, RankValue], reporters: Reporters, rank: int) -> dict[str, Any]:
    """Return the JSON form of a rank's values, without the contents that another rank reports."""
    out = {}
    for name, value in values.items():
        reporter = reporters.get(name, rank)
        out[name] = [value.kind, value.digest, reporter, value.content if reporter == rank else None]
    return out


def value_text(values: Mapping[str, RankValue], reporters: Reporters, rank: int) -> bytes:
    """Return `value_fields` as JSON, reusing the texts encoded for the digests."""
    parts = []
    for name, value in values.items():
        reporter = reporters.get(name, rank)
        text = (value.text or strictjson.dumps(value.content)) if reporter == rank else b"null"
        head = strictjson.dumps([value.kind, value.digest, reporter])
        parts.append(strictjson.dumps(name) + b":" + head[:-1] + b"," + text + b"]")
    return b"{" + b",".join(parts) + b"}"


def values_from(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, RankValue]]:
    """Return the complete values of every rank; raises ValuesChanged if a rank no longer agrees with its reporter."""
    out = []
    for rank, fields in enumerate(everyone):
        own = {}
        for name, (kind, digest, reporter, content) in fields.items():
            if reporter == rank:
                own[name] = RankValue(kind, content, digest)
                continue
            reported = everyone[reporter].get(name)
            if reported is None or reported[1] != digest:
                raise ValuesChanged(
                    f"{name!r} was the same on ranks {reporter} and {rank} when the save was planned, but differs now"
                )
            own[name] = RankValue(kind, reported[3], digest)
        out.append(own)
    return out


def merge_values(
    everyone: Sequence[Mapping[str, RankValue]],
    axes: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
    tensor_keys: Mapping[str, Iterable[str]],
) -> dict[str, Any]:
    """Return the entries of state.json; `axes` has the mesh axes that each tree depends on.

    Raises ValuesChanged if a tree now depends on other axes, and LayoutError if ranks contradict
    each other.
    """
    entries: dict[str, Any] = {}
    for name in sorted({name for own in everyone for name, value in own.items() if value.kind not in _NOT_ENTRIES}):
        values = [own.get(name) for own in everyone]
        kinds = {value.kind for value in values if value is not None}
        if kinds == {OPTIMIZER}:
            distinct = {value.digest: value.content for value in values if value is not None}
            entries[name] = _merge_optimizer(name, list(distinct.values()), tensor_keys.get(name, ()))
        elif kinds == {SUBCLASSES}:
            entries[name] = merge_descriptions(name, [value.content for value in values if value is not None])
        elif kinds == {SPLIT_DICT}:
            entries[name] = merge_split_dict(name, values)
        else:
            entries[name] = _merge_tree(name, values, axes.get(name, ()), mesh)
    return entries


# Prefixes that no other value's name can have.
FILE_PREFIX, EXTRA_PREFIX, PLAN_PREFIX, BASE_PREFIX = "file:", "extra:", "plan:", "base:"
PROGRAM_PREFIX = "program:"


def merge_files(everyone: Sequence[Mapping[str, RankValue]]) -> dict[str, bytes]:
    """Return small files such as config.json, each from the first rank that has it."""
    files: dict[str, bytes] = {}
    for own in everyone:
        for name, value in own.items():
            if value.kind == FILE:
                files.setdefault(name.removeprefix(FILE_PREFIX), value.content.encode())
    return files


def extra_value(data: bytes) -> RankValue:
    """Return a file that a user publishes with the step, as a rank's value."""
    return RankValue.of(EXTRA, base64.b64encode(data).decode())


def program_file(data: bytes) -> RankValue:
    """Return a file of the model's program, as a rank's value."""
    return RankValue.of(PROGRAM_FILE, base64.b64encode(data).decode())


def program_files(everyone: Sequence[Mapping[str, RankValue]]) -> dict[str, bytes]:
    """Return the files of the model's program: program.json, and the tensors that only the program has."""
    return {
        name.removeprefix(PROGRAM_PREFIX): base64.b64decode(value.content)
        for own in everyone
        for name, value in own.items()
        if value.kind == PROGRAM_FILE
    }


def extra_files(everyone: Sequence[Mapping[str, RankValue]]) -> dict[str, bytes]:
    """Return the files that a user publishes with the step; only rank 0 has any."""
    return {
        name.removeprefix(EXTRA_PREFIX): base64.b64decode(value.content)
        for own in everyone
        for name, value in own.items()
        if value.kind == EXTRA
    }


def merge_plans(everyone: Sequence[Mapping[str, RankValue]]) -> dict[str, Any]:
    """Return the sharding plan of each module by name; raises LayoutError if ranks used different plans."""
    plans: dict[str, RankValue] = {}
    for own in everyone:
        for name, value in own.items():
            if value.kind == PLAN and plans.setdefault(name.removeprefix(PLAN_PREFIX), value).digest != value.digest:
                raise LayoutError(f"{name.removeprefix(PLAN_PREFIX)}: ranks placed it by different plans")
    return {name: value.content for name, value in sorted(plans.items())}


def merge_bases(everyone: Sequence[Mapping[str, RankValue]]) -> dict[str, Any]:
    """Return where the base model of each module with adapters is, from the first rank that says so."""
    bases: dict[str, Any] = {}
    for own in everyone:
        for name, value in own.items():
            if value.kind == BASE_MODEL:
                bases.setdefault(name.removeprefix(BASE_PREFIX), value.content)
    return dict(sorted(bases.items()))


def merge_split_dict(name: str, values: Sequence[RankValue | None]) -> dict[str, Any]:
    """Merge a dict whose keys are split over ranks, as pipeline stages split the modules of a model."""
    kind = ""
    merged: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for value in values:
        if value is None:
            continue
        kind = value.content["kind"]
        for key, digest in value.content["digests"].items():
            merged.setdefault(key, value.content["value"][key])
            if digests.setdefault(key, digest) != digest:
                raise ValuesChanged(f"{name}: {key!r} now differs between ranks")
    return {"kind": kind, "value": merged}


def _merge_tree(name: str, values: Sequence[RankValue | None], axes: tuple[str, ...], mesh: Mesh) -> dict[str, Any]:
    """Return one value if the ranks agree, else one value per coordinate."""
    first: dict[str, RankValue] = {}
    for rank, value in enumerate(values):
        if value is None:
            continue
        at = label(axes, coordinate_on(mesh, axes, rank) or ())
        if first.setdefault(at, value).digest != value.digest:
            raise ValuesChanged(f"{name!r} now differs between ranks{f' at {at}' if at else ''}")
    some = next(iter(first.values()))
    if not axes:
        return {"kind": some.content[0], "value": some.content[1]}
    by_coordinate = {at: value.content[1] for at, value in first.items()}
    sizes = list(axis_sizes(mesh, axes, len(values)))
    return {"kind": some.content[0], "axes": list(axes), "sizes": sizes, "values": by_coordinate}


def _merge_optimizer(name: str, answers: Sequence[Mapping[str, Any]], tensor_keys: Iterable[str]) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    for answer in answers:
        for key, value in answer["scalars"].items():
            if (known := scalars.setdefault(key, value)) != value:
                state = next(state for state in (*value, *known) if known.get(state) != value.get(state))
                raise LayoutError(
                    f"{name}: the state {state!r} of {key} differs between ranks: {str(known.get(state))[:60]} on one, "
                    f"{str(value.get(state))[:60]} on another"
                )
    spans = [answer["spans"] for answer in answers if "spans" in answer]
    if any(other != spans[0] for other in spans[1:]):
        raise LayoutError(f"{name}: its state belongs to all parameters, and the ranks have different ones")
    with_state = {key.rpartition("/")[0] for key in tensor_keys} | set(scalars)
    stateless = {key for answer in answers for key in answer["stateless"]} - with_state
    return {
        "kind": "optimizer",
        "groups": merge_groups(name, (answer["groups"] for answer in answers)),
        "stateless": sorted(stateless),
        "scalars": scalars,
        "masters": next((answer["masters"] for answer in answers if answer["masters"]), None),
        **({"spans": spans[0]} if spans else {}),
    }


def merge_groups(name: str, per_rank: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge the parameter groups of all ranks: those with equal options at the same index become one.

    Pipeline stages have different parameters in a group; so do the ranks of some optimizers.
    Raises LayoutError if a parameter has different options on different ranks.
    """
    merged: dict[str, dict[str, Any]] = {}
    options_of: dict[str, Any] = {}
    for groups in per_rank:
        for index, group in enumerate(groups):
            known = merged.setdefault(f"{index}:{group['options']!r}", {"params": [], "options": group["options"]})
            known["params"] = sorted({*known["params"], *group["params"]}, key=natural_key)
            for key in group["params"]:
                other = options_of.setdefault(key, group["options"])
                options = group["options"]
                pairs = (
                    (option, other.get(option, _ABSENT), options.get(option, _ABSENT))
                    for option in {**other, **options}
                )
                differing = [option for option, theirs, own in pairs if theirs != own]
                if differing:
                    raise LayoutError(
                        f"{name}: {key} has different options ({', '.join(differing)}) on different ranks"
                    )
    return list(merged.values())
