"""The plan of a whole checkpoint: files of each group and their blocks (see plan/save_plan.py), and the commit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.checkpoint.commit import Commit, FileFacts
from holdfast.core.errors import Unsupported
from holdfast.core.names import case_collision
from holdfast.engine.options import SaveOptions
from holdfast.format.manifest import GroupRecord
from holdfast.plan.coverage import Holding
from holdfast.plan.files import FileMembers, FilePlan, Place, TensorSpec, assign_to_files
from holdfast.plan.save_plan import SavePlan, plan_save

if TYPE_CHECKING:
    from holdfast.adapters.saving.agreement import Agreement, TensorName

Groups = dict[str, tuple[FilePlan, ...]]


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The files of each group and their blocks, valid as long as the ranks hold the same layout."""

    agreement: Agreement
    groups: Groups
    save: SavePlan
    first_replica: tuple[TensorName, ...]

    @property
    def group_of(self) -> dict[str, str]:
        """The group of each file."""
        return {file.name: group for group, files in self.groups.items() for file in files}

    def commit(self, block_bytes: int, mappings: Mapping[str, str] | None = None) -> Commit:
        """Return the part of the manifest that all saves of this plan share; `mappings` by module are recorded."""
        agreement = self.agreement
        keys = {
            group: {place.spec.key: place.file for file in files for place in file.places}
            for group, files in self.groups.items()
        }
        return Commit(
            block_bytes=block_bytes,
            files=tuple(FileFacts.of(file) for file in self.save.files),
            groups={group: self._record(group, files) for group, files in self.groups.items()},
            keys=keys,
            axes=agreement.axes,
            mesh=agreement.mesh,
            world=len(agreement.hosts),
            hosts=len(set(agreement.hosts)),
            first_replica=tuple(f"{group}: {key}" for group, key in self.first_replica),
            mappings=dict(sorted((mappings or {}).items())),
        )

    def _record(self, group: str, files: tuple[FilePlan, ...]) -> GroupRecord:
        specs = [place.spec for file in files for place in file.places]
        tensors = self.agreement.tensors
        logical = {
            spec.key: tensors[group, spec.key].logical.name
            for spec in specs
            if tensors[group, spec.key].logical.name != spec.dtype.name
        }
        aliases = dict(sorted(self.agreement.aliases.get(group, {}).items()))
        total = sum(spec.bytes for spec in specs)
        return GroupRecord(self.agreement.kinds[group], tuple(file.name for file in files), total, aliases, logical)


def plan_checkpoint(
    agreement: Agreement,
    options: SaveOptions,
    first_replica: Collection[TensorName] = (),
    *,
    only: Collection[int] | None = None,
    all_files: bool = True,
) -> CheckpointPlan:
    """Split the groups into files and plan their blocks: all blocks, or those that concern the ranks `only`.

    Without `all_files`, files without bytes of those ranks are left out: only the committing rank needs them.
    """
    specs: dict[str, list[TensorSpec]] = {group: [] for group in sorted(agreement.kinds)}
    for (group, key), tensor in agreement.tensors.items():
        specs[group].append(TensorSpec(key, tensor.dtype, tensor.shape))
    ranks = None if only is None else frozenset(only)
    block_bytes = options.block_bytes

    def holds(group: str, spec: TensorSpec) -> bool:
        return ranks is None or not ranks.isdisjoint(agreement.tensors[group, spec.key].spread.ranks)

    def is_needed(group: str, file: FileMembers) -> bool:
        if all_files or any(holds(group, spec) for spec in file.members):
            return True
        # Any rank may write a header that fills a block, and a file without tensor bytes.
        return file.header_limit >= block_bytes or not any(spec.bytes for spec in file.members)

    groups = {
        group: tuple(
            file.plan()
            for file in assign_to_files(group, members, options.max_shard_bytes, agreement.kinds[group])
            if is_needed(group, file)
        )
        for group, members in specs.items()
    }
    group_of = {file.name: group for group, files in groups.items() for file in files}
    twins = case_collision(file.name for files in groups.values() for file in files)
    if twins is not None:
        raise Unsupported(
            f"two groups would be written to {twins[0]!r} and {twins[1]!r}: an adapter has the name of another entry"
        )
    # Replicas of a buffer may start to differ at any time: all of a buffer comes from one rank.
    first = frozenset(first_replica) | {name for name, tensor in agreement.tensors.items() if tensor.role == "buffer"}

    def holding_of(place: Place) -> Holding:
        name = (group_of[place.file], place.spec.key)
        return agreement.holding(name, first=name in first)

    def concerns(place: Place) -> bool:
        return holds(group_of[place.file], place.spec)

    files = [file for members in groups.values() for file in members]
    plan = plan_save(
        files,
        holding_of,
        agreement.hosts,
        block_bytes,
        only=ranks,
        is_relevant=concerns,
        whole_files=options.whole_files,
    )
    return CheckpointPlan(agreement, groups, plan, tuple(first_replica))
