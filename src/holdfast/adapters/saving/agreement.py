"""Agreement of the ranks: one merged layout, the reporter of each value, and fingerprints that compare replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.adapters.saving.collect import Collected, SaveItem, stored_view
from holdfast.adapters.tensors import fingerprint
from holdfast.core.errors import LayoutError
from holdfast.core.names import case_collision
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.coordinates import coordinate_on, label, varying_axes
from holdfast.layout.placement import Mesh, RankLayout, Spread, Spreads, layout_fields, layout_from_fields
from holdfast.plan.coverage import Holding, Holdings
from holdfast.plan.state_values import RankValue, ValuesChanged, merge_split_dict

TensorName = tuple[str, str]  # group, key


@dataclass(frozen=True, slots=True)
class AgreedTensor:
    """A tensor's dtype, shape, role and layout over all ranks."""

    dtype: DType
    logical: DType
    shape: tuple[int, ...]
    role: str
    spread: Spread


@dataclass(frozen=True, slots=True)
class Agreement:
    """The layout of the state over all ranks, and the rank that reports each value.

    `axes` are the mesh axes along which each tree varies. `uniform` names the values that are equal on every
    rank. `partitioned` names the dicts whose keys are partitioned over ranks. `reporters` and `labels` (the
    coordinates of trees) are those of this rank. `digest` identifies the layout of all ranks.
    """

    tensors: dict[TensorName, AgreedTensor]
    kinds: dict[str, str]
    aliases: dict[str, dict[str, str]]
    hosts: tuple[int, ...]
    mesh: Mesh
    axes: dict[str, tuple[str, ...]]
    partitioned: frozenset[str]
    uniform: frozenset[str]
    reporters: dict[str, int]
    labels: dict[str, str]
    digest: str
    holdings: Holdings

    def holding(self, name: TensorName, *, first: bool = False) -> Holding:
        tensor = self.tensors[name]
        return self.holdings.of(tensor.shape, tensor.spread, f"{name[0]}: {name[1]}", first=first)


def agree(ranks: Ranks, collected: Collected, mesh: Mesh, target: str) -> Agreement:
    """Merge the state of all ranks into one layout; raises LayoutError on every rank if the layout is invalid.

    Adds the tensors of stateful objects to `collected.items`, once it is known which of them differ
    between ranks.
    """
    answers = run_on_all_ranks(ranks, lambda: _introduce(ranks, collected, target))
    targets = sorted({answer["target"] for answer in answers})
    if len(targets) > 1:
        raise LayoutError(f"the ranks save to different paths: {' and '.join(targets[:2])}")
    partitioned = _partitioned_names([answer["dealt"] for answer in answers])
    digests = [
        {name: digest for name, digest in answer["trees"].items() if name not in partitioned} for answer in answers
    ]
    axes = {
        name: varying_axes(mesh, [own.get(name) for own in digests])
        for name in sorted({name for own in digests for name in own})
    }
    labels = {name: label(axes[name], coordinate_on(mesh, axes[name], ranks.rank) or ()) for name in axes}
    value_digests = run_on_all_ranks(ranks, lambda: _value_digests(collected, partitioned, labels))
    digests_of_ranks, descriptions = _gather_descriptions(ranks, collected)
    tensors = _merge(descriptions)
    uniform = frozenset(name for name in value_digests[0] if len({own.get(name) for own in value_digests}) == 1)
    hosts = [answer["host"] for answer in answers]
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    aliases: dict[str, dict[str, str]] = {}
    for answer in answers:
        for group, ties in answer["aliases"].items():
            aliases.setdefault(group, {}).update(ties)
    kinds = {group: kind for answer in answers for group, kind in answer["kinds"].items()}
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
        partitioned=partitioned,
        uniform=uniform,
        reporters=_reporters(ranks, collected, value_digests, uniform),
        labels=labels,
        digest=digest_hex(strictjson.dumps([digests_of_ranks, sorted(partitioned), axes])),
        holdings=Holdings(),
    )


def _reporters(
    ranks: Ranks, collected: Collected, digests: Sequence[Mapping[str, str]], uniform: frozenset[str]
) -> dict[str, int]:
    """Return the rank that reports each of this rank's values: the first rank with the same value.

    Values that differ between some ranks may be equal by chance now and differ later: each rank reports its own.
    """
    out = {}
    for name, digest in digests[ranks.rank].items():
        shared = name in uniform or name not in collected.trees
        out[name] = next(r for r, own in enumerate(digests) if own.get(name) == digest) if shared else ranks.rank
    return out


def _introduce(ranks: Ranks, collected: Collected, target: str) -> dict[str, Any]:
    reports = collected.value_reports(frozenset())
    return {
        "target": target,
        "host": ranks.host(),
        "trees": {name: report.digest for name, report in reports.items() if name in collected.trees},
        "dealt": {
            name: own.content for name in collected.trees if (own := collected.partitioned_report(name)) is not None
        },
        "kinds": collected.kinds | {name: "stateful" for name, tree in collected.trees.items() if tree.tensors},
        "aliases": collected.aliases,
    }


def _partitioned_names(answers: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the dicts that agree between ranks on common keys: pipeline stages may partition their keys."""
    out = set()
    for name in {name for own in answers for name in own}:
        reports = [RankValue("dealt", own[name], "") if name in own else None for own in answers]
        try:
            merge_split_dict(name, reports)
        except ValuesChanged:
            continue  # the value differs between ranks, so it is stored by coordinate
        out.add(name)
    return frozenset(out)


def _value_digests(collected: Collected, partitioned: frozenset[str], labels: Mapping[str, str]) -> dict[str, str]:
    collected.add_tree_tensors(labels)
    return {name: report.digest for name, report in collected.value_reports(partitioned).items()}


def _gather_descriptions(ranks: Ranks, collected: Collected) -> tuple[list[str], list[tuple[Any, list[int]]]]:
    """Return the digests of all ranks' descriptions, and each distinct description with its ranks."""
    description: list[Any] = []

    def describe() -> str:
        meshes: list[Mesh] = []
        tensors = [
            [o.group, o.key, o.role, o.logical.name, list(o.holder.shape), layout_fields(o.holder.how, meshes), o.outer]
            for o in collected.items
        ]
        description.append([[[mesh.axes, mesh.sizes, mesh.ranks] for mesh in meshes], tensors])
        return digest_hex(strictjson.dumps(description[0]))

    digests = run_on_all_ranks(ranks, describe)
    is_first = digests.index(digests[ranks.rank]) == ranks.rank
    texts = ranks.gather(description[0] if is_first else None)
    by_digest: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        by_digest.setdefault(digest, []).append(rank)
    return digests, [(texts[members[0]], members) for members in by_digest.values()]


def _merge(descriptions: Sequence[tuple[Any, list[int]]]) -> dict[TensorName, AgreedTensor]:
    """Merge the descriptions of all ranks into one layout."""
    facts: dict[TensorName, tuple[str, tuple[int, ...], str, int]] = {}
    held: dict[TensorName, list[tuple[RankLayout, tuple[int, ...]]]] = {}
    outer_of: dict[tuple[str, str], str] = {}
    for (mesh_fields, tensors), members in descriptions:
        ranks = tuple(members)
        meshes = [Mesh(tuple(axes), tuple(sizes), tuple(all_ranks)) for axes, sizes, all_ranks in mesh_fields]
        for group, key, role, logical, shape, how, outer in tensors:
            name = (group, key)
            if outer_of.setdefault(name, outer) != outer:
                raise LayoutError(
                    f"{group}: the key {key} belongs to a tensor inside of the tensor subclass "
                    f"{outer or outer_of[name]}, and to another tensor"
                )
            known = facts.setdefault(name, (logical, tuple(shape), role, ranks[0]))
            if known[:2] != (logical, tuple(shape)):
                raise LayoutError(
                    f"{group}: {key} is {logical}{shape} on rank {ranks[0]} "
                    f"but {known[0]}{list(known[1])} on rank {known[3]}"
                )
            held.setdefault(name, []).append((layout_from_fields(how, meshes), ranks))
    _refuse_mixed(facts, outer_of)
    spreads = Spreads()
    out = {}
    for name, (logical_name, shape, role, _) in facts.items():
        logical = dtype_named(logical_name)
        out[name] = AgreedTensor(dtype_named(logical.stored), logical, shape, role, spreads.of(held[name]))
    return out


def _refuse_mixed(facts: Mapping[TensorName, tuple[Any, ...]], outer_of: Mapping[TensorName, str]) -> None:
    """Raise LayoutError if a tensor is a subclass on some ranks and a plain tensor on others."""
    for (group, key), outer in outer_of.items():
        if outer and (group, outer) in facts:
            _, shape, _, plain = facts[group, outer]
            raise LayoutError(
                f"{group}: {outer} of shape {list(shape)} is a plain tensor on rank {plain} but a tensor subclass, "
                f"with {key.removeprefix(outer)} inside, on rank {facts[group, key][3]}; make it the same on all ranks"
            )


def differing_replicas(
    ranks: Ranks, agreement: Agreement, own: Mapping[TensorName, list[SaveItem]], replicas: str
) -> list[TensorName]:
    """Compare elements that several ranks hold; each rank hashes only its replicated elements.

    Returns the buffers that differ; their first replica is saved. Other tensors that differ raise
    LayoutError, unless `replicas` is "first".
    """
    fingerprints = run_on_all_ranks(ranks, lambda: _own_fingerprints(agreement, own))
    seen: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, prints in enumerate(fingerprints):
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


_WHOLE_BYTES = 64 << 10  # hashing this many bytes at every save takes microseconds
_SAMPLED = 1024  # elements hashed of a larger value


def plain_values(own: Mapping[TensorName, list[SaveItem]]) -> dict[TensorName, list[SaveItem]]:
    """Return the host tensors and arrays of plain values, such as RNG states, which may diverge unnoticed."""
    return {name: items for name, items in own.items() if all(map(_is_host_value, items))}


def _is_host_value(item: SaveItem) -> bool:
    return item.role == "value" and item.holder.local.device.type == "cpu"


def _sample(local: torch.Tensor) -> torch.Tensor:
    """Return a small tensor whole, or evenly spaced elements of a large one: diverged ranks rarely agree on all."""
    if local.nbytes <= _WHOLE_BYTES or not local.is_contiguous():
        return local
    return local.view(-1)[:: -(-local.numel() // _SAMPLED)]


def plain_values_digest(agreement: Agreement, collected: Collected) -> str:
    """Return a digest of the plain values that every rank holds whole; large values are sampled."""
    parts = []
    for item in filter(_is_host_value, collected.items):
        cells = agreement.holding((item.group, item.key)).cells
        if len(cells) == 1 and len(cells[0].holders) == len(agreement.hosts):
            parts.append(f"{item.group}\n{item.key}\n{fingerprint(_sample(item.holder.local))}")
    return digest_hex("\n".join(parts).encode())


def _differ(group: str, key: str, role: str, ranks: tuple[int, int]) -> str:
    """Return the error message for replicas that differ; a plain tensor may be intended to differ per rank."""
    text = f"{group}: {key} has different values on rank {ranks[0]} and rank {ranks[1]}, which should be replicas "
    if role != "value":
        return text + "(or tied copies); synchronize them, or save with replicas='first' to keep the first"
    return text + (
        "because it is a plain tensor or array of the state. If every rank has its own value (an RNG state, a position "
        f"in the data), wrap it in an object with state_dict() and load_state_dict(): state[{group!r}] = your object. "
        "Its values are then saved and loaded per mesh coordinate. If the ranks should agree, synchronize the value "
        "before the save"
    )


def _own_fingerprints(agreement: Agreement, own: Mapping[TensorName, list[SaveItem]]) -> list[list[str]]:
    out = []
    for (group, key), items in own.items():
        for number, cell in enumerate(agreement.holding((group, key)).cells):
            if len(cell.holders) < 2:
                continue
            for item in items:
                for part in item.holder.parts:
                    if part.box.contains(cell.box):
                        view = stored_view(item, part)[cell.box.within(part.box)]
                        out.append([f"{group}\n{key}\n{number}", fingerprint(view)])
    return out
