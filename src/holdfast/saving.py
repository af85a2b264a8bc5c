"""The way of a save: collect, agree, plan, write, publish. Collective over all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.ranks import Ranks, together
from holdfast.format import names, strictjson
from holdfast.format.index import encode_index
from holdfast.format.manifest import GroupRecord, Manifest
from holdfast.persist.checkpoint import Checkpoint
from holdfast.persist.publish import (
    check_replaceable,
    file_records,
    new_attempt,
    now,
    publish,
    put_small_files,
    small_file_record,
)
from holdfast.persist.write import BlockReport, drop_travel_files, write_blocks
from holdfast.plan.files import FilePlan, TensorSpec, split_group
from holdfast.plan.save import SavePlan, plan_save
from holdfast.storage.base import Storage
from holdfast.version import __version__

if TYPE_CHECKING:
    from holdfast.adapters.consensus import Shared, TensorName
    from holdfast.adapters.offers import Collected, Offer
    from holdfast.layout.mesh import Mesh


class HoldfastWarning(UserWarning):
    """Something that a user should know and that does not stop the work."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a state is saved. `max_shard_size` and `block_bytes` are part of the canonical bytes."""

    max_shard_size: int | str = limits.MAX_SHARD_BYTES
    block_bytes: int = limits.BLOCK_BYTES
    model_dtype: str | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    replicas: str = "error"
    mesh: Any = None

    @property
    def max_shard_bytes(self) -> int:
        return limits.parse_bytes(self.max_shard_size)

    def __post_init__(self) -> None:
        limits.parse_bytes(self.max_shard_size)
        if self.replicas not in ("error", "first"):
            raise InvalidArgument(f"replicas={self.replicas!r}: choose 'error' or 'first'")
        if self.block_bytes % limits.PAGE_BYTES or self.block_bytes <= 0:
            raise InvalidArgument(f"block_bytes={self.block_bytes} is not a multiple of {limits.PAGE_BYTES}")


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan with the files of each group, for as long as the ranks hold the same layout."""

    plan: SavePlan
    groups: dict[str, tuple[FilePlan, ...]]


class Saver:
    """Saves states to one storage; remembers the plan and that replicas were compared."""

    def __init__(self, storage: Storage, options: SaveOptions) -> None:
        self._storage = storage
        self._options = options
        self._planned: tuple[Any, _Planned] | None = None
        self._compared: frozenset[TensorName] | None = None
        self._first_replica: list[TensorName] = []
        self._warned: frozenset[TensorName] = frozenset()

    def save(
        self, ranks: Ranks, folder: str, state: MutableMapping[str, Any], *, step: int | None, parent: int | None
    ) -> Checkpoint:
        """Save the state as `folder`; every rank returns the committed checkpoint or raises the same error."""
        from holdfast.adapters.consensus import agree
        from holdfast.adapters.offers import LiveSources

        collected, mesh = self._collect(ranks, state)
        shared = agree(ranks, collected, mesh, f"{self._storage.name}/{folder} at step {step}")
        own: dict[TensorName, list[Offer]] = {}
        for offer in collected.offers:
            own.setdefault((offer.group, offer.key), []).append(offer)
        self._compare_replicas(ranks, shared, own)
        planned = self._plan(shared)
        attempt = self._begin(ranks, folder, planned.plan)
        try:
            group_of = {file.name: group for group, files in planned.groups.items() for file in files}
            reports = write_blocks(planned.plan, ranks, self._storage, attempt, LiveSources(own, group_of))
            manifest, small = self._manifest(ranks, attempt, step, parent, shared, planned, reports, mesh)
            together(ranks, lambda: self._publish(ranks, attempt, folder, manifest, small, planned.plan))
        except BaseException:
            if ranks.rank == 0:
                self._storage.discard(attempt)
            raise
        opened: list[Checkpoint] = []
        together(ranks, lambda: opened.append(Checkpoint(self._storage, folder)))
        self._warn_of_first_replicas(ranks)
        return opened[0]

    def _collect(self, ranks: Ranks, state: MutableMapping[str, Any]) -> tuple[Collected, Mesh]:
        from holdfast.adapters.entries import LiveState, live_mesh, merge_owners, sort_state
        from holdfast.adapters.offers import collect

        sorted_state: list[LiveState] = []
        found: list[tuple[Collected, Mesh]] = []

        def sort() -> dict[str, list[str]]:
            sorted_state.append(sort_state(state, self._options.ties))
            return sorted_state[0].own_owners()

        owners = merge_owners(together(ranks, sort))

        def work() -> None:
            live = replace(sorted_state[0], owners=owners)
            mesh = live_mesh(live, ranks.world, self._options.mesh)
            found.append((collect(live, self._options.model_dtype), mesh))

        together(ranks, work)
        return found[0]

    def _compare_replicas(self, ranks: Ranks, shared: Shared, own: Mapping[TensorName, list[Offer]]) -> None:
        """At the first save, and when tensors came or went: other saves would pay for what is known."""
        from holdfast.adapters.consensus import differing_replicas

        names_now = frozenset(shared.tensors)
        if self._compared != names_now:
            self._first_replica = differing_replicas(ranks, shared.tensors, own, self._options.replicas)
            self._compared = names_now
        for name in self._first_replica:
            tensor = shared.tensors[name]
            shared.tensors[name] = replace(tensor, holding=tensor.holding.first())

    def _warn_of_first_replicas(self, ranks: Ranks) -> None:
        """After the last word between ranks: a warning that is made an error must not leave others waiting."""
        names_now = frozenset(self._first_replica)
        if names_now and names_now != self._warned and ranks.rank == 0:
            shown = ", ".join(f"{group}: {key}" for group, key in self._first_replica[:10])
            more = f" and {len(names_now) - 10} more" if len(names_now) > 10 else ""
            warnings.warn(f"replicas differ between ranks, the first is saved: {shown}{more}", HoldfastWarning, 4)
        self._warned = names_now

    def _plan(self, shared: Shared) -> _Planned:
        layout = (shared.tensors, shared.kinds, shared.hosts)
        if self._planned is not None and self._planned[0] == layout:
            return self._planned[1]
        specs: dict[str, list[TensorSpec]] = {group: [] for group in sorted(shared.kinds)}
        for (group, key), tensor in shared.tensors.items():
            specs[group].append(TensorSpec(key, tensor.dtype, tensor.shape))
        groups = {group: split_group(group, members, self._options.max_shard_bytes) for group, members in specs.items()}
        files = [file for members in groups.values() for file in members]
        group_of = {file.name: group for group, members in groups.items() for file in members}
        holdings = {
            place: shared.tensors[group_of[file.name], place.spec.key].holding
            for file in files
            for place in file.places
        }
        plan = plan_save(files, holdings, shared.hosts, self._options.block_bytes)
        self._planned = (layout, _Planned(plan, groups))
        return self._planned[1]

    def _begin(self, ranks: Ranks, folder: str, plan: SavePlan) -> str:
        """Rank 0 makes the attempt's folder and files; the others learn its name."""
        attempt = new_attempt()

        def work() -> str | None:
            if ranks.rank:
                return None
            check_replaceable(self._storage, folder)
            self._storage.begin(attempt)
            for file in plan.files:
                self._storage.create(attempt, file.name, file.size)
            return attempt

        try:
            return str(together(ranks, work)[0])
        except BaseException:
            if ranks.rank == 0:
                self._storage.discard(attempt)
            raise

    def _manifest(
        self,
        ranks: Ranks,
        attempt: str,
        step: int | None,
        parent: int | None,
        shared: Shared,
        planned: _Planned,
        reports: list[BlockReport],
        mesh: Mesh,
    ) -> tuple[Manifest, dict[str, bytes]]:
        small = dict(shared.files)
        small[names.STATE] = strictjson.dumps({"version": 1, "entries": shared.entries}) + b"\n"
        if len(small[names.STATE]) > limits.JSON_BYTES:
            raise Unsupported(f"the values that are not tensors take {len(small[names.STATE])} bytes of JSON: too much")
        groups = {}
        for group, files in planned.groups.items():
            members = [place for file in files for place in file.places]
            total = sum(place.spec.bytes for place in members)
            small[names.index_file(group)] = encode_index({place.spec.key: place.file for place in members}, total)
            logical = {
                key: tensor.logical.name
                for (owner, key), tensor in shared.tensors.items()
                if owner == group and tensor.logical.name != tensor.dtype.name
            }
            kind = shared.kinds[group]
            aliases = dict(sorted(shared.aliases.get(group, {}).items()))
            groups[group] = GroupRecord(kind, tuple(file.name for file in files), total, aliases, logical)
        records = file_records(planned.plan.files, reports)
        records |= {name: small_file_record(data, self._options.block_bytes) for name, data in sorted(small.items())}
        writer: dict[str, Any] = {
            "holdfast": __version__,
            "world": ranks.world,
            "hosts": len(set(shared.hosts)),
            "mesh": dict(zip(mesh.axes, mesh.sizes, strict=True)),
        }
        if self._first_replica:
            writer["first_replica"] = [f"{group}: {key}" for group, key in self._first_replica]
        manifest = Manifest(step, parent, attempt, now(), self._options.block_bytes, groups, records, writer)
        return manifest, small

    def _publish(
        self, ranks: Ranks, attempt: str, folder: str, manifest: Manifest, small: Mapping[str, bytes], plan: SavePlan
    ) -> None:
        if ranks.rank:
            return
        put_small_files(self._storage, attempt, small)
        drop_travel_files(plan, self._storage, attempt)
        publish(self._storage, attempt, folder, manifest)
