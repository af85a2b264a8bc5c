"""What the ranks hold together: one layout from everyone's offers, and replicas that agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.adapters.coordinates import axis_sizes, coordinate_on, label, varying_axes
from holdfast.adapters.fingerprint import fingerprint
from holdfast.adapters.offers import Collected, Offer, stored_view, tree_digest
from holdfast.adapters.optimizer import merge_groups
from holdfast.adapters.tree import Tree
from holdfast.core.errors import LayoutError
from holdfast.core.ranks import Ranks, together
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.layout.mesh import Mesh
from holdfast.plan.check import cells_of
from holdfast.plan.save import Holding

TensorName = tuple[str, str]  # group, key


@dataclass(frozen=True, slots=True)
class Agreed:
    """One tensor as all ranks hold it."""

    dtype: DType
    logical: DType
    shape: tuple[int, ...]
    role: str
    holding: Holding


@dataclass(frozen=True, slots=True)
class Shared:
    """What all ranks know of a save once they have talked: everything but the tensors' bytes."""

    tensors: dict[TensorName, Agreed]
    kinds: dict[str, str]
    aliases: dict[str, dict[str, str]]
    hosts: tuple[int, ...]
    entries: dict[str, Any]
    files: dict[str, bytes]


def agree(ranks: Ranks, collected: Collected, mesh: Mesh, target: str) -> Shared:
    """Gather what every rank holds and make it one state; raises LayoutError on all ranks if it is none.

    Adds the tensors of stateful objects to `collected.offers`, now that it is known which of
    them differ between ranks.
    """
    everyone = together(ranks, lambda: _introduce(ranks, collected, target))
    targets = sorted({answer["target"] for answer in everyone})
    if len(targets) > 1:
        raise LayoutError(f"the ranks save to different places: {' and '.join(targets[:2])}")
    dealt = _merge_dealt([answer["dealt"] for answer in everyone])
    others = [{name: digest for name, digest in answer["trees"].items() if name not in dealt} for answer in everyone]
    entries = dealt | _agree_on_trees(ranks, collected, mesh, others)
    tensors = merge(together(ranks, lambda: [_describe(offer) for offer in collected.offers]))
    entries |= _agree_on_optimizers([answer["optimizers"] for answer in everyone], tensors)
    hosts = [answer["host"] for answer in everyone]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    aliases: dict[str, dict[str, str]] = {}
    for answer in everyone:
        for group, ties in answer["aliases"].items():
            aliases.setdefault(group, {}).update(ties)
    return Shared(
        tensors=tensors,
        kinds={group: kind for answer in everyone for group, kind in answer["kinds"].items()},
        aliases=aliases,
        hosts=tuple(numbers[host] for host in hosts),
        entries=dict(sorted(entries.items())),
        files={name: text.encode() for answer in reversed(everyone) for name, text in answer["files"].items()},
    )


def _introduce(ranks: Ranks, collected: Collected, target: str) -> dict[str, Any]:
    return {
        "target": target,
        "host": ranks.host(),
        "trees": {name: tree_digest(tree) for name, tree in collected.trees.items()},
        "dealt": {name: own for name in collected.trees if (own := _dealt(collected, name)) is not None},
        "optimizers": collected.optimizers,
        "kinds": collected.kinds | {name: "stateful" for name, tree in collected.trees.items() if tree.tensors},
        "aliases": collected.aliases,
        "files": {name: data.decode() for name, data in collected.files.items()},
    }


def _dealt(collected: Collected, name: str) -> dict[str, Any] | None:
    """A dict of tensors or extra states, whose keys may be dealt to ranks as a pipeline deals modules."""
    kind, tree = collected.tree_kinds[name], collected.trees[name]
    plain = isinstance(tree.value, dict) and not any(key.startswith("$") for key in tree.value)
    if kind not in ("tensors", "module") or not plain:
        return None
    digests = {}
    for key, item in tree.value.items():
        own = {path: tensor for path, tensor in tree.tensors.items() if path == key or path.startswith(f"{key}.")}
        digests[key] = tree_digest(Tree(item, own))
    return {"kind": kind, "value": tree.value, "digests": digests}


def _merge_dealt(everyone: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One value from all ranks' keys, for those trees on whose common keys all ranks agree."""
    merged: dict[str, Any] = {}
    digests: dict[tuple[str, str], str] = {}
    conflicting: set[str] = set()
    for answer in everyone:
        for name, own in answer.items():
            entry = merged.setdefault(name, {"kind": own["kind"], "value": {}})
            for key, value in own["value"].items():
                entry["value"].setdefault(key, value)
                if digests.setdefault((name, key), own["digests"][key]) != own["digests"][key]:
                    conflicting.add(name)
    return {name: entry for name, entry in merged.items() if name not in conflicting}


def _agree_on_trees(
    ranks: Ranks, collected: Collected, mesh: Mesh, digests: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """The state.json entries: one value where ranks agree, else a value for each coordinate."""
    axes = {
        name: varying_axes(mesh, [own.get(name) for own in digests])
        for name in sorted({n for own in digests for n in own})
    }

    def own_values() -> dict[str, list[Any]]:
        out = {}
        for name, tree in collected.trees.items():
            if name not in axes:
                collected.offer_tree(name, "")
                continue
            coordinate = coordinate_on(mesh, axes[name], ranks.rank) or ()
            text = label(axes[name], coordinate)
            collected.offer_tree(name, text)
            earlier = range(ranks.rank)
            known = any(name in digests[r] and coordinate_on(mesh, axes[name], r) == coordinate for r in earlier)
            if not known:
                out[name] = [collected.tree_kinds[name], text, tree.value]
        return out

    entries: dict[str, Any] = {}
    for answer in together(ranks, own_values):
        for name, (kind, text, value) in answer.items():
            if not axes[name]:
                entries[name] = {"kind": kind, "value": value}
                continue
            sizes = list(axis_sizes(mesh, axes[name], ranks.world))
            entry = entries.setdefault(name, {"kind": kind, "axes": list(axes[name]), "sizes": sizes, "values": {}})
            entry["values"][text] = value
    return entries


def _agree_on_optimizers(everyone: Sequence[Mapping[str, Any]], tensors: Mapping[TensorName, Agreed]) -> dict[str, Any]:
    entries = {}
    for name in sorted({name for own in everyone for name in own}):
        answers = [own[name] for own in everyone if name in own]
        scalars: dict[str, Any] = {}
        for answer in answers:
            for key, value in answer["scalars"].items():
                if scalars.setdefault(key, value) != value:
                    raise LayoutError(f"{name}: the state of {key} has different plain values on different ranks")
        with_state = {key.rpartition("/")[0] for group, key in tensors if group == name} | set(scalars)
        stateless = {key for answer in answers for key in answer["stateless"]} - with_state
        entries[name] = {
            "kind": "optimizer",
            "groups": merge_groups(name, (answer["groups"] for answer in answers)),
            "stateless": sorted(stateless),
            "scalars": scalars,
            "masters": next((answer["masters"] for answer in answers if answer["masters"]), None),
        }
    return entries


def _describe(offer: Offer) -> list[Any]:
    boxes = [[*part.box.offsets, *part.box.sizes] for part in offer.holder.parts]
    return [offer.group, offer.key, offer.role, offer.logical.name, list(offer.holder.shape), boxes]


def merge(everyone: Sequence[Sequence[list[Any]]]) -> dict[TensorName, Agreed]:
    """One layout from the descriptions of all ranks."""
    facts: dict[TensorName, tuple[str, list[int], str, int]] = {}
    boxes: dict[TensorName, list[tuple[int, Box]]] = {}
    for rank, descriptions in enumerate(everyone):
        for group, key, role, logical, shape, held in descriptions:
            name = (group, key)
            known = facts.setdefault(name, (logical, shape, role, rank))
            if known[:2] != (logical, shape):
                raise LayoutError(
                    f"{group}: {key} is {logical}{shape} on rank {rank} but {known[0]}{known[1]} on rank {known[3]}"
                )
            dims = len(shape)
            boxes.setdefault(name, []).extend((rank, Box(tuple(b[:dims]), tuple(b[dims:]))) for b in held)
    out = {}
    for name, (logical_name, shape, role, _) in facts.items():
        logical = dtype_named(logical_name)
        held_boxes = [box for _, box in boxes[name]]
        cells = cells_of(tuple(shape), held_boxes, f"{name[0]}: {name[1]}")
        holding = Holding(tuple(cells), tuple(rank for rank, _ in boxes[name]), tuple(held_boxes))
        out[name] = Agreed(dtype_named(logical.stored), logical, tuple(shape), role, holding)
    return out


def differing_replicas(
    ranks: Ranks, agreed: Mapping[TensorName, Agreed], own: Mapping[TensorName, list[Offer]], replicas: str
) -> list[TensorName]:
    """Compare what several ranks hold of the same elements; each hashes only what it shares.

    Returns buffers that differ, of which the first replica is saved. Other tensors that
    differ raise LayoutError, unless `replicas` is "first".
    """
    everyone = together(ranks, lambda: _own_fingerprints(ranks.rank, agreed, own))
    seen: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, prints in enumerate(everyone):
        for cell_name, value in prints:
            first_rank, first = seen.setdefault(cell_name, (rank, value))
            if value != first:
                differing.setdefault(cell_name, (first_rank, rank))
    tolerated = []
    for cell_name, (first_rank, rank) in differing.items():
        group, key, _ = cell_name.split("\n")
        role = agreed[group, key].role
        if role != "buffer" and replicas != "first":
            raise LayoutError(
                f"{group}: {key} has different values on rank {first_rank} and rank {rank}, which should be replicas "
                "(or tied copies); synchronise them, or save with replicas='first' to keep the first"
            )
        tolerated.append((group, key))
    return sorted(set(tolerated))


def _own_fingerprints(
    rank: int, agreed: Mapping[TensorName, Agreed], own: Mapping[TensorName, list[Offer]]
) -> list[list[str]]:
    out = []
    for (group, key), offers in own.items():
        for number, cell in enumerate(agreed[group, key].holding.cells):
            if len(cell.holders) < 2:
                continue
            for offer in offers:
                for part in offer.holder.parts:
                    if part.box.contains(cell.box):
                        view = stored_view(offer, part)[cell.box.within(part.box)]
                        out.append([f"{group}\n{key}\n{number}", fingerprint(view)])
    return out
