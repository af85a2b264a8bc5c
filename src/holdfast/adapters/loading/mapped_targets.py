"""A mapping applied to a load: the contents of a checkpoint under the keys of the live state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.adapters.live_state import LiveState
from holdfast.adapters.subclass_tensors import is_subclass, view_subclass
from holdfast.adapters.tensors import Holder, holder_of
from holdfast.adapters.tree import flatten
from holdfast.format.dtypes import dtype_named
from holdfast.mapping.apply import EqualScalars, MappedContents, map_contents
from holdfast.mapping.per_module import ModelInfo, programs
from holdfast.mapping.program import Mapping as Program
from holdfast.plan.contents import Contents
from holdfast.plan.files import TensorSpec


@dataclass(frozen=True, slots=True)
class TargetTensors:
    """The tensors of one group that a mapping may fill on one rank, as the ranks exchange them. All fields are JSON."""

    name: str  # of the group
    tensors: Mapping[str, Sequence[Any]]  # by key: dtype, shape, TP degree
    ties: Mapping[str, str]

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)


def describe_targets(live: LiveState) -> list[TargetTensors]:
    """Return the tensors that a mapping may fill on this rank, group by group."""
    tensors = {name: dict(view.tensors) for name, view in live.modules.items()}
    tensors |= {name: flatten(name, value).tensors for name, value in live.trees.items()}
    out = []
    for group, members in tensors.items():
        described = {}
        for key, holder in (held for name, tensor in members.items() for held in _holders(group, name, tensor)):
            described[key] = [holder.stored.name, list(holder.shape), holder.how.tp_degree]
        out.append(TargetTensors(group, described, dict(live.modules[group].ties) if group in live.modules else {}))
    return out


def _holders(group: str, key: str, tensor: Any) -> list[tuple[str, Holder]]:
    """Return a tensor, or the tensors inside of a tensor subclass, with their keys."""
    where = f"{group}: {key}"
    if not is_subclass(tensor):
        return [(key, holder_of(tensor, where, allow_meta=True))]
    return [(inner.key, inner.holder) for inner in view_subclass(tensor, key, where).inner]


def map_stored(
    contents: Contents,
    mapping: Any,
    live_tensors: Sequence[TargetTensors],
    config: Callable[[str], Mapping[str, Any] | None],
    stored_names: Mapping[str, Program],
    *,
    reverse: bool = False,
    partial: bool = False,
    lenient: Callable[[str, str], bool] = lambda module, key: False,
) -> MappedContents:
    """Map the contents of a checkpoint to the keys of the live state of all ranks.

    `stored_names` are programs for modules without a mapping from the user. They only undo the names that
    a model's own save gave, so that misfits are reported later and parameter numbers keep their meaning.
    `lenient(group, key)` returns True if a mismatch of that tensor is reported later. `partial` means that the
    checkpoint was saved with patterns that may have left sources of the mapping out.
    """
    wanted: dict[str, dict[str, tuple[TensorSpec, int | None]]] = {}
    ties: dict[str, dict[str, str]] = {}
    for group in live_tensors:
        ties.setdefault(group.name, {}).update(group.ties)
        for key, (dtype, shape, degree) in group.tensors.items():
            spec = TensorSpec(key, dtype_named(dtype), tuple(shape))
            wanted.setdefault(group.name, {})[key] = (spec, degree)
    kept: frozenset[str] = frozenset()
    same: tuple[EqualScalars, ...] = ()

    def model_info(module: str) -> ModelInfo:
        stored = contents.groups[module].tensors if module in contents.groups else None
        live = wanted[module]
        return ModelInfo(config(module), *((live, stored) if reverse else (stored, live)))

    given = {} if mapping is None else programs(mapping, list(wanted), model_info, reverse=reverse)
    for module, program in {**stored_names, **given}.items():
        is_own = module not in given
        if (is_own or partial) and module not in contents.groups:
            continue
        targets = wanted[module]
        specs = {key: spec for key, (spec, _) in targets.items()}
        degrees = {key: degree for key, (_, degree) in targets.items()}
        mapped = map_contents(
            contents,
            module,
            program.with_optional_statements() if partial else program,
            specs,
            ties=ties[module],
            target_tp=degrees.get,
            lenient=functools.partial(_always if is_own else lenient, module),
            keeps_numbers=is_own,
        )
        contents, kept = mapped.contents, kept | mapped.kept
        same = same if is_own else (*same, *mapped.equal_scalars)  # those of one parameter were written as one
    return MappedContents(contents, kept, same)


def _always(module: str, key: str) -> bool:
    return True
