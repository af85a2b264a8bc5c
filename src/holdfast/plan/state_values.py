"""Values that are not tensors: one state.json from what every rank tells of its own.

A rank tells each of its values as a `Told`. Ranks that were seen to tell the same need not
repeat it: they name the first of them and the digest, and what that one tells stands for theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import LayoutError
from holdfast.format import strictjson
from holdfast.format.digest import Digest
from holdfast.format.names import natural_key
from holdfast.layout.coordinates import axis_sizes, coordinate_on, label
from holdfast.layout.mesh import Mesh

TREE, DEALT, OPTIMIZER, FILE, PLAN = "tree", "dealt", "optimizer", "file", "plan"


class Changed(LayoutError):
    """Ranks that told the same when the save was planned differ now: it has to be planned anew."""


@dataclass(frozen=True, slots=True)
class Told:
    """One value of one rank: its kind and content. Equal digests mean equal values, tensors included."""

    kind: str
    content: Any
    digest: str
    text: bytes = b""  # the content as JSON, where it was made for the digest

    @staticmethod
    def of(kind: str, content: Any, extra: str = "") -> Told:
        text = strictjson.dumps(content)
        digest = Digest()
        for part in (kind.encode(), b"\0", extra.encode(), b"\0", text):
            digest.update(part)
        return Told(kind, content, digest.hex(), text)


Speakers = Mapping[str, int]  # of each value: the first rank that tells the same


def value_fields(told: Mapping[str, Told], speakers: Speakers, rank: int) -> dict[str, Any]:
    """The JSON form of a rank's values, without what another rank tells for it."""
    out = {}
    for name, value in told.items():
        speaker = speakers.get(name, rank)
        out[name] = [value.kind, value.digest, speaker, value.content if speaker == rank else None]
    return out


def value_text(told: Mapping[str, Told], speakers: Speakers, rank: int) -> bytes:
    """The same as JSON, of the texts that were made for the digests: a large value is not encoded again."""
    parts = []
    for name, value in told.items():
        speaker = speakers.get(name, rank)
        text = (value.text or strictjson.dumps(value.content)) if speaker == rank else b"null"
        head = strictjson.dumps([value.kind, value.digest, speaker])
        parts.append(strictjson.dumps(name) + b":" + head[:-1] + b"," + text + b"]")
    return b"{" + b",".join(parts) + b"}"


def values_from(everyone: Sequence[Mapping[str, Any]]) -> list[dict[str, Told]]:
    """Every rank's values whole again; raises Changed where a rank no longer agrees with its speaker."""
    out = []
    for rank, fields in enumerate(everyone):
        own = {}
        for name, (kind, digest, speaker, content) in fields.items():
            if speaker == rank:
                own[name] = Told(kind, content, digest)
                continue
            spoken = everyone[speaker].get(name)
            if spoken is None or spoken[1] != digest:
                raise Changed(f"{name!r} was the same on ranks {speaker} and {rank} when the save was planned, not now")
            own[name] = Told(kind, spoken[3], digest)
        out.append(own)
    return out


def merge_values(
    everyone: Sequence[Mapping[str, Told]],
    axes: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
    tensor_keys: Mapping[str, Iterable[str]],
) -> dict[str, Any]:
    """The entries of state.json. `axes` says on which mesh axes each tree was found to depend.

    Raises Changed if a tree depends on more than that by now, LayoutError if ranks contradict
    each other.
    """
    entries: dict[str, Any] = {}
    for name in sorted({name for own in everyone for name, told in own.items() if told.kind not in (FILE, PLAN)}):
        told = [own.get(name) for own in everyone]
        kinds = {value.kind for value in told if value is not None}
        if kinds == {OPTIMIZER}:
            distinct = {value.digest: value.content for value in told if value is not None}
            entries[name] = _merge_optimizer(name, list(distinct.values()), tensor_keys.get(name, ()))
        elif kinds == {DEALT}:
            entries[name] = merge_dealt(name, told)
        else:
            entries[name] = _merge_tree(name, told, axes.get(name, ()), mesh)
    return entries


FILE_PREFIX, PLAN_PREFIX = "file:", "plan:"  # no other value can have such a name


def merge_files(everyone: Sequence[Mapping[str, Told]]) -> dict[str, bytes]:
    """Small files such as config.json, from the first rank that has each."""
    files: dict[str, bytes] = {}
    for own in everyone:
        for name, told in own.items():
            if told.kind == FILE:
                files.setdefault(name.removeprefix(FILE_PREFIX), told.content.encode())
    return files


def merge_plans(everyone: Sequence[Mapping[str, Told]]) -> dict[str, Any]:
    """How modules were placed, by name; raises LayoutError where ranks followed different plans."""
    plans: dict[str, Told] = {}
    for own in everyone:
        for name, told in own.items():
            if told.kind == PLAN and plans.setdefault(name.removeprefix(PLAN_PREFIX), told).digest != told.digest:
                raise LayoutError(f"{name.removeprefix(PLAN_PREFIX)}: ranks placed it by different plans")
    return {name: told.content for name, told in sorted(plans.items())}


def merge_dealt(name: str, told: Sequence[Told | None]) -> dict[str, Any]:
    """One dict whose keys are dealt to ranks as a pipeline deals modules."""
    kind = ""
    merged: dict[str, Any] = {}
    digests: dict[str, str] = {}
    for value in told:
        if value is None:
            continue
        kind = value.content["kind"]
        for key, digest in value.content["digests"].items():
            merged.setdefault(key, value.content["value"][key])
            if digests.setdefault(key, digest) != digest:
                raise Changed(f"{name}: {key!r} now differs between ranks")
    return {"kind": kind, "value": merged}


def _merge_tree(name: str, told: Sequence[Told | None], axes: tuple[str, ...], mesh: Mesh) -> dict[str, Any]:
    """One value where ranks agree, else a value for each coordinate."""
    first: dict[str, Told] = {}
    for rank, value in enumerate(told):
        if value is None:
            continue
        at = label(axes, coordinate_on(mesh, axes, rank) or ())
        if first.setdefault(at, value).digest != value.digest:
            raise Changed(f"{name!r} now differs between ranks{f' at {at}' if at else ''}")
    some = next(iter(first.values()))
    if not axes:
        return {"kind": some.content[0], "value": some.content[1]}
    values = {at: value.content[1] for at, value in first.items()}
    sizes = list(axis_sizes(mesh, axes, len(told)))
    return {"kind": some.content[0], "axes": list(axes), "sizes": sizes, "values": values}


def _merge_optimizer(name: str, answers: Sequence[Mapping[str, Any]], tensor_keys: Iterable[str]) -> dict[str, Any]:
    scalars: dict[str, Any] = {}
    for answer in answers:
        for key, value in answer["scalars"].items():
            if scalars.setdefault(key, value) != value:
                raise LayoutError(f"{name}: the state of {key} has different plain values on different ranks")
    with_state = {key.rpartition("/")[0] for key in tensor_keys} | set(scalars)
    stateless = {key for answer in answers for key in answer["stateless"]} - with_state
    return {
        "kind": "optimizer",
        "groups": merge_groups(name, (answer["groups"] for answer in answers)),
        "stateless": sorted(stateless),
        "scalars": scalars,
        "masters": next((answer["masters"] for answer in answers if answer["masters"]), None),
    }


def merge_groups(name: str, per_rank: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One list of groups for all ranks: those with the same options at the same place become one.

    Pipeline stages have different parameters in a group; so do ranks of some optimizers. A
    parameter with different options on different ranks is a LayoutError.
    """
    merged: dict[str, dict[str, Any]] = {}
    options_of: dict[str, Any] = {}
    for groups in per_rank:
        for index, group in enumerate(groups):
            known = merged.setdefault(f"{index}:{group['options']!r}", {"params": [], "options": group["options"]})
            known["params"] = sorted({*known["params"], *group["params"]}, key=natural_key)
            for key in group["params"]:
                other = options_of.setdefault(key, group["options"])
                differing = [option for option, value in group["options"].items() if other.get(option) != value]
                if differing:
                    raise LayoutError(
                        f"{name}: {key} has different options ({', '.join(differing)}) on different ranks"
                    )
    return list(merged.values())
