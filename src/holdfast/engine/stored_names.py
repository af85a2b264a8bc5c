"""The names in the files of a checkpoint: recorded by the save, or those of the hub by a model's conversion rules.

A recorded mapping is followed as it is, whatever version of transformers is installed. Without one, names are those
in memory. A checkpoint of another tool, or one whose names are not those in memory, is read as the from_pretrained
of a transformers model reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged, InvalidArgument
from holdfast.core.names import MANIFEST
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.options import LoadOptions
from holdfast.format.manifest import unknown
from holdfast.mapping.program import Mapping as Program
from holdfast.sources.foreign import Foreign

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.loading.mapped_targets import TargetTensors

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StoredNames:
    """By module: the program from the tensors in the files to those in memory. `kept` is what a run writes further.

    `live` are the tensors of all ranks that a mapping may fill, if there is any mapping.
    """

    programs: Mapping[str, Program] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    live: Sequence[TargetTensors] = ()


def stored_names(ranks: Ranks, checkpoint: Checkpoint, live: LiveState, options: LoadOptions) -> StoredNames:
    """Find out the names of the modules that have no mapping from the user. Collective."""
    from holdfast.adapters.hub.saved_names import convertible_modules, first_ranks
    from holdfast.adapters.loading.mapped_targets import TargetTensors, describe_targets

    def probe() -> list[Any]:
        return [sorted(live.modules), sorted(live.trees), convertible_modules(live) if live.pretrained else []]

    answers = run_on_all_ranks(ranks, probe)
    modules = {name for answer in answers for name in answer[0]}
    groups = {*modules, *(name for answer in answers for name in answer[1])} - _mapped_by_user(options, modules)
    recorded = {name: text for name, text in checkpoint.manifest.mappings.items() if name in groups}
    pretrained = [answer[2] for answer in answers]
    candidates = first_ranks(pretrained) if options.hub_keys and any(pretrained) else {}
    candidates = {name: rank for name, rank in candidates.items() if name in groups and name not in recorded}
    in_memory = {name: "" for name in modules & groups if name in checkpoint.manifest.groups}
    if options.mapping is None and not recorded and not candidates:
        return StoredNames(kept=in_memory)

    def describe() -> list[dict[str, Any]]:
        return [group.fields() for group in describe_targets(live)]

    targets = [TargetTensors(**fields) for answer in run_on_all_ranks(ranks, describe) for fields in answer]
    finder = _NameFinder(ranks, checkpoint, live, _shapes_of(targets))
    programs = {
        name: _lenient(_recorded_program(name, text, checkpoint))
        for name, text in recorded.items()
        if any(name in names for names in pretrained) or not finder.covers(name)
    }
    derived = finder.derive(candidates)
    kept = {name: text for name, text in in_memory.items() if name not in derived}
    return StoredNames({**programs, **derived}, {**kept, **recorded}, targets)


def _mapped_by_user(options: LoadOptions, modules: set[str]) -> set[str]:
    """Return the modules that the user's mapping is for."""
    if options.mapping is None:
        return set()
    if isinstance(options.mapping, Mapping) and "aoa_statements" not in options.mapping:
        return set(options.mapping)
    return {"model"} if "model" in modules else modules


def _recorded_program(name: str, text: str, checkpoint: Checkpoint) -> Program:
    """Return the program from the files to memory; raises Unsupported if a newer version has other statements."""
    try:
        return Program.parse(f"{text}\n").reverse()  # of several lines, so that it never names a file
    except InvalidArgument as problem:
        where = f"{checkpoint.path}/{MANIFEST}"
        raise unknown(f"the mapping of {name}: {problem}", checkpoint.manifest.version, where) from None


def _lenient(program: Program) -> Program:
    """Return a program that makes what it can: what is missing or left over is in the report, like any other key."""
    return Program(tuple(replace(s, options=replace(s.options, optional=True)) for s in program.statements))


def _shapes_of(targets: Sequence[TargetTensors]) -> dict[str, Shapes]:
    out: dict[str, Shapes] = {}
    for group in targets:
        members = out.setdefault(group.name, {})
        for key, (_, shape, _) in group.tensors.items():
            if key not in group.ties:
                members[key] = tuple(shape)
    return out


class _NameFinder:
    """Compares the names and shapes of a checkpoint with those of the live tensors of all ranks."""

    def __init__(
        self, ranks: Ranks, checkpoint: Checkpoint, live: LiveState, live_shapes: Mapping[str, Shapes]
    ) -> None:
        self._ranks = ranks
        self._checkpoint = checkpoint
        self._live = live
        self._live_shapes = live_shapes

    def _stored_shapes(self, module: str) -> Shapes:
        group = self._checkpoint.contents.groups.get(module)
        return {} if group is None else {key: recipe.shape for key, recipe in group.tensors.items()}

    def covers(self, module: str) -> bool:
        """Return True if the checkpoint has every live tensor of a module under its name in memory."""
        stored = self._stored_shapes(module)
        return all(stored.get(key) == shape for key, shape in self._live_shapes.get(module, {}).items())

    def derive(self, candidates: Mapping[str, int]) -> dict[str, Program]:
        """Return the programs of modules that are read by their conversion rules. Collective."""

        def derive() -> dict[str, str]:
            own = [name for name, rank in candidates.items() if rank == self._ranks.rank]
            return {name: text for name in own if (text := self._derived(name))}

        answers = run_on_all_ranks(self._ranks, derive) if candidates else []
        return {name: _lenient(Program.parse(text)) for answer in answers for name, text in answer.items()}

    def _derived(self, module: str) -> str:
        """Return the mapping of one module, "" if it has none: its names are then compared as they are."""
        from holdfast.adapters.hub.mappings import loading_mapping
        from holdfast.adapters.hub.rules import has_rules
        from holdfast.adapters.hub.traced_tensor import UntracedOperation

        try:
            stored = self._stored_shapes(module)
            model = self._live.modules[module].module
            converts = isinstance(self._checkpoint, Foreign) and has_rules(model)
            if not stored or (not converts and self.covers(module)):
                return ""
            return loading_mapping(model, stored, self._live_shapes[module])
        except (Damaged, UntracedOperation):  # a damaged file is reported when the keys are compared
            return ""
