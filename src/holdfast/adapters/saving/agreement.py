"""What the ranks hold together: one layout from everyone's offers, and replicas that agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.saving.collect import Collected, Offer, stored_view
from holdfast.adapters.tensors import fingerprint
from holdfast.core.errors import LayoutError
from holdfast.core.filenames import case_collision
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.coordinates import coordinate_on, label, varying_axes
from holdfast.layout.mesh import Mesh
from holdfast.layout.spread import RankLayout, Spread, Spreads, layout_fields, layout_from_fields
from holdfast.plan.coverage import Holding, Holdings
from holdfast.plan.state_values import RankValue, ValuesChanged, merge_split_dict

TensorName = tuple[str, str]  # group, key


@dataclass(frozen=True, slots=True)
class Agreed:
    """One tensor as all ranks hold it."""

    dtype: DType
    logical: DType
    shape: tuple[int, ...]
    role: str
    spread: Spread


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks know once they have talked: enough to plan, and to know who tells which value.

    `axes` are the mesh axes on which each tree depends; `uniform` names the values that are the
    same on every rank; `reporters` and `labels` (the coordinates of trees) are this rank's own.
    `digest` stands for the layout of all ranks.
    """

    tensors: dict[TensorName, Agreed]
    kinds: dict[str, str]
    aliases: dict[str, dict[str, str]]
    hosts: tuple[int, ...]
    mesh: Mesh
    axes: dict[str, tuple[str, ...]]
    dealt: frozenset[str]
    uniform: frozenset[str]
    reporters: dict[str, int]
    labels: dict[str, str]
    digest: str
    holdings: Holdings

    def holding(self, name: TensorName, *, first: bool = False) -> Holding:
        tensor = self.tensors[name]
        return self.holdings.of(tensor.shape, tensor.spread, f"{name[0]}: {name[1]}", first=first)


def agree(ranks: Ranks, collected: Collected, mesh: Mesh, target: str) -> Agreement:
    """Gather what every rank holds and make it one state; raises LayoutError on all ranks if it is none.

    Adds the tensors of stateful objects to `collected.offers`, now that it is known which of
    them differ between ranks.
    """
    everyone = run_on_all_ranks(ranks, lambda: _introduce(ranks, collected, target))
    targets = sorted({answer["target"] for answer in everyone})
    if len(targets) > 1:
        raise LayoutError(f"the ranks save to different places: {' and '.join(targets[:2])}")
    dealt = _dealt_names([answer["dealt"] for answer in everyone])
    digests = [{name: told for name, told in answer["trees"].items() if name not in dealt} for answer in everyone]
    axes = {
        name: varying_axes(mesh, [own.get(name) for own in digests])
        for name in sorted({name for own in digests for name in own})
    }
    labels = {name: label(axes[name], coordinate_on(mesh, axes[name], ranks.rank) or ()) for name in axes}
    told = run_on_all_ranks(ranks, lambda: _tell(collected, dealt, labels))
    digests_of_ranks, described = _described(ranks, collected)
    tensors = _merge(described)
    uniform = frozenset(name for name in told[0] if len({own.get(name) for own in told}) == 1)
    hosts = [answer["host"] for answer in everyone]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    aliases: dict[str, dict[str, str]] = {}
    for answer in everyone:
        for group, ties in answer["aliases"].items():
            aliases.setdefault(group, {}).update(ties)
    kinds = {group: kind for answer in everyone for group, kind in answer["kinds"].items()}
    twins = case_collision(kinds)
    if twins is not None:
        raise LayoutError(f"the groups {twins[0]!r} and {twins[1]!r} differ only by case; rename one of them")
    return Agreement(
        tensors=tensors,
        kinds=kinds,
        aliases=aliases,
        hosts=tuple(numbers[host] for host in hosts),
        mesh=mesh,
        axes=axes,
        dealt=dealt,
        uniform=uniform,
        reporters=_reporters(ranks, collected, told, uniform),
        labels=labels,
        digest=digest_hex(strictjson.dumps([digests_of_ranks, sorted(dealt), axes])),
        holdings=Holdings(),
    )


def _reporters(
    ranks: Ranks, collected: Collected, told: Sequence[Mapping[str, str]], uniform: frozenset[str]
) -> dict[str, int]:
    """Who tells each of this rank's values: the first rank that has the same.

    Values that differ between some ranks may agree by chance now and not later: each rank tells its own.
    """
    out = {}
    for name, digest in told[ranks.rank].items():
        alike = name in uniform or name not in collected.trees
        out[name] = next(r for r, own in enumerate(told) if own.get(name) == digest) if alike else ranks.rank
    return out


def _introduce(ranks: Ranks, collected: Collected, target: str) -> dict[str, Any]:
    return {
        "target": target,
        "host": ranks.host(),
        "trees": {name: told.digest for name, told in collected.told(frozenset()).items() if name in collected.trees},
        "dealt": {name: own.content for name in collected.trees if (own := collected.told_dealt(name)) is not None},
        "kinds": collected.kinds | {name: "stateful" for name, tree in collected.trees.items() if tree.tensors},
        "aliases": collected.aliases,
    }


def _dealt_names(everyone: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """The dicts on whose common keys all ranks agree: their keys may be dealt as a pipeline deals modules."""
    out = set()
    for name in {name for own in everyone for name in own}:
        told = [RankValue("dealt", own[name], "") if name in own else None for own in everyone]
        try:
            merge_split_dict(name, told)
        except ValuesChanged:
            continue  # it differs between ranks, so it is kept by coordinate
        out.add(name)
    return frozenset(out)


def _tell(collected: Collected, dealt: frozenset[str], labels: Mapping[str, str]) -> dict[str, str]:
    collected.offer_trees(labels)
    return {name: told.digest for name, told in collected.told(dealt).items()}


def _described(ranks: Ranks, collected: Collected) -> tuple[list[str], list[tuple[Any, list[int]]]]:
    """The digests of all ranks' descriptions, and each different one with the ranks that gave it."""
    description: list[Any] = []

    def describe() -> str:
        meshes: list[Mesh] = []
        tensors = [
            [o.group, o.key, o.role, o.logical.name, list(o.holder.shape), layout_fields(o.holder.how, meshes)]
            for o in collected.offers
        ]
        description.append([[[mesh.axes, mesh.sizes, mesh.ranks] for mesh in meshes], tensors])
        return digest_hex(strictjson.dumps(description[0]))

    digests = run_on_all_ranks(ranks, describe)
    speaks = digests.index(digests[ranks.rank]) == ranks.rank
    texts = ranks.gather(description[0] if speaks else None)
    by_digest: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        by_digest.setdefault(digest, []).append(rank)
    return digests, [(texts[members[0]], members) for members in by_digest.values()]


def _merge(described: Sequence[tuple[Any, list[int]]]) -> dict[TensorName, Agreed]:
    """One layout from the descriptions of all ranks."""
    facts: dict[TensorName, tuple[str, tuple[int, ...], str, int]] = {}
    held: dict[TensorName, list[tuple[RankLayout, tuple[int, ...]]]] = {}
    for (mesh_fields, tensors), members in described:
        ranks = tuple(members)
        meshes = [Mesh(tuple(axes), tuple(sizes), tuple(all_ranks)) for axes, sizes, all_ranks in mesh_fields]
        for group, key, role, logical, shape, how in tensors:
            name = (group, key)
            known = facts.setdefault(name, (logical, tuple(shape), role, ranks[0]))
            if known[:2] != (logical, tuple(shape)):
                raise LayoutError(
                    f"{group}: {key} is {logical}{shape} on rank {ranks[0]} "
                    f"but {known[0]}{list(known[1])} on rank {known[3]}"
                )
            held.setdefault(name, []).append((layout_from_fields(how, meshes), ranks))
    spreads = Spreads()
    out = {}
    for name, (logical_name, shape, role, _) in facts.items():
        logical = dtype_named(logical_name)
        out[name] = Agreed(dtype_named(logical.stored), logical, shape, role, spreads.of(held[name]))
    return out


def differing_replicas(
    ranks: Ranks, agreement: Agreement, own: Mapping[TensorName, list[Offer]], replicas: str
) -> list[TensorName]:
    """Compare what several ranks hold of the same elements; each hashes only what it shares.

    Returns buffers that differ, of which the first replica is saved. Other tensors that
    differ raise LayoutError, unless `replicas` is "first".
    """
    everyone = run_on_all_ranks(ranks, lambda: _own_fingerprints(agreement, own))
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
        role = agreement.tensors[group, key].role
        if role != "buffer" and replicas != "first":
            raise LayoutError(_differ(group, key, role, (first_rank, rank)))
        tolerated.append((group, key))
    return sorted(set(tolerated))


_WHOLE_BYTES = 64 << 10  # a digest of so few bytes at every save takes some microseconds
_SAMPLED = 1024  # elements of a larger value


def plain_values(own: Mapping[TensorName, list[Offer]]) -> dict[TensorName, list[Offer]]:
    """The host tensors and arrays of plain values: random states and the like, that drift apart unseen."""
    return {name: offers for name, offers in own.items() if all(map(_is_host_value, offers))}


def _is_host_value(offer: Offer) -> bool:
    return offer.role == "value" and offer.holder.local.device.type == "cpu"


def _sample(local: torch.Tensor) -> torch.Tensor:
    """A tensor, or elements from all over a large one: ranks that drift apart rarely agree in all of them."""
    if local.nbytes <= _WHOLE_BYTES or not local.is_contiguous():
        return local
    return local.view(-1)[:: -(-local.numel() // _SAMPLED)]


def plain_values_digest(agreement: Agreement, collected: Collected) -> str:
    """Equal on ranks whose plain values are equal, of those that every rank holds whole; large ones by a sample."""
    parts = []
    for offer in filter(_is_host_value, collected.offers):
        cells = agreement.holding((offer.group, offer.key)).cells
        if len(cells) == 1 and len(cells[0].holders) == len(agreement.hosts):
            parts.append(f"{offer.group}\n{offer.key}\n{fingerprint(_sample(offer.holder.local))}")
    return digest_hex("\n".join(parts).encode())


def _differ(group: str, key: str, role: str, ranks: tuple[int, int]) -> str:
    """What to do about replicas that differ: a tensor of a plain dict may be meant to be each rank's own."""
    text = f"{group}: {key} has different values on rank {ranks[0]} and rank {ranks[1]}, which should be replicas "
    if role != "value":
        return text + "(or tied copies); synchronise them, or save with replicas='first' to keep the first"
    return text + (
        "since it is a plain tensor or array of the state. If every rank has its own (a random state, a position in "
        f"the data), put it into the state as an object with state_dict() and load_state_dict(): state[{group!r}] = "
        "your object. Its values are kept for each mesh coordinate and come back there. If the ranks should agree, "
        "synchronise it before the save"
    )


def _own_fingerprints(agreement: Agreement, own: Mapping[TensorName, list[Offer]]) -> list[list[str]]:
    out = []
    for (group, key), offers in own.items():
        for number, cell in enumerate(agreement.holding((group, key)).cells):
            if len(cell.holders) < 2:
                continue
            for offer in offers:
                for part in offer.holder.parts:
                    if part.box.contains(cell.box):
                        view = stored_view(offer, part)[cell.box.within(part.box)]
                        out.append([f"{group}\n{key}\n{number}", fingerprint(view)])
    return out
