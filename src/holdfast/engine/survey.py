"""The survey, first phase of a save: collect each rank's state, map its keys, agree on a layout, compare replicas."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.bases import BaseChooser
from holdfast.engine.options import SaveOptions
from holdfast.plan.contents import KeySelection

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.saving.agreement import Agreement, TensorName
    from holdfast.adapters.saving.collect import Collected
    from holdfast.adapters.saving.save_selection import SaveSelection
    from holdfast.adapters.saving.stored_keys import StoredKeys
    from holdfast.adapters.tensors import Holders
    from holdfast.layout.placement import Mesh
    from holdfast.plan.state_values import RankValue


@dataclass(frozen=True, slots=True)
class LayoutSurvey:
    """This rank's state, and the layout that all ranks agreed on."""

    collected: Collected
    owners: Mapping[str, list[str]]  # of all ranks: the modules that each optimizer spans
    agreement: Agreement
    mappings: Mapping[str, str]  # by module: those to names on the hub, which the manifest records


@dataclass(frozen=True, slots=True)
class Survey:
    """A layout whose replicas were compared, this rank's values, and the tensors saved from their first replica."""

    layout: LayoutSurvey
    values: Mapping[str, RankValue]
    first_replica: tuple[TensorName, ...]

    @property
    def collected(self) -> Collected:
        return self.layout.collected

    @property
    def agreement(self) -> Agreement:
        return self.layout.agreement


class Surveyor:
    """Takes the surveys of one run. Replicas are compared only when tensors are added or removed."""

    def __init__(self, options: SaveOptions, holders: Holders | None = None) -> None:
        self._options = options
        self._holders = holders
        self._compared: frozenset[TensorName] | None = None
        self._first_replica: tuple[TensorName, ...] = ()
        self._warned: frozenset[TensorName] = frozenset()
        self._stored_keys: StoredKeys | None = None
        self.selection: SaveSelection | None = None
        self.by_coordinate: frozenset[tuple[str, str]] = frozenset()  # states that ranks quantize differently
        self._names: Mapping[str, str] = {}  # by module: the mapping of the step that was restored, or ""
        self._notices: dict[str, bool] = {}  # by text: whether it was emitted
        self.bases = BaseChooser(options)

    def survey(self, ranks: Ranks, state: MutableMapping[str, Any], target: str) -> Survey:
        """Collect the state of every rank and agree on one layout; every rank returns or raises alike."""
        return self.compare_replicas(ranks, self.survey_layout(ranks, state, target))

    def compare_replicas(self, ranks: Ranks, layout: LayoutSurvey) -> Survey:
        """Find the tensors whose replicas differ, if tensors were added or removed, and take the values. Collective."""
        from holdfast.adapters.saving.agreement import differing_replicas, plain_values

        agreement = layout.agreement
        names = frozenset(agreement.tensors)
        own = layout.collected.by_name()
        if self._compared != names:
            self._first_replica = tuple(differing_replicas(ranks, agreement, own, self._options.replicas))
            self._compared = names
        elif self._options.replicas == "error" and ranks.world > 1:
            differing_replicas(ranks, agreement, plain_values(own), self._options.replicas)
        return Survey(layout, layout.collected.value_reports(agreement.partitioned), self._first_replica)

    def survey_layout(self, ranks: Ranks, state: MutableMapping[str, Any], target: str) -> LayoutSurvey:
        """Collect the state of every rank and agree on one layout, without comparing replicas."""
        from holdfast.adapters.saving.agreement import agree

        collected, mesh, owners = self._collect(ranks, state)
        agreement = agree(ranks, collected, mesh, target)
        run_on_all_ranks(ranks, lambda: _check_coverage(agreement, collected))
        mappings = {} if self._stored_keys is None else self._stored_keys.recorded
        return LayoutSurvey(collected, owners, agreement, mappings)

    def keep_names(self, names: Mapping[str, str]) -> bool:
        """Write modules under these names from now on: a run keeps the names of the step that it restored.

        Returns True if these are other names than before.
        """
        before, self._names = self._names, dict(names)
        return before != self._names

    def _collect(self, ranks: Ranks, state: MutableMapping[str, Any]) -> tuple[Collected, Mesh, dict[str, list[str]]]:
        from holdfast.adapters.hub.saved_names import first_ranks, hub_candidates
        from holdfast.adapters.live_state import classify_state, has_adapters, live_mesh, merge_owners
        from holdfast.adapters.low_bit_optimizers import mixed_states
        from holdfast.adapters.saving.collect import collect
        from holdfast.adapters.saving.save_selection import RankSelection
        from holdfast.mapping.apply import refuse_nested_states

        if any(run_on_all_ranks(ranks, lambda: has_adapters(state))) or self.bases.parts:
            self.bases.choose(ranks, state)
        self._notices.update(dict.fromkeys(self.bases.notices, False) | self._notices)
        classified: list[LiveState] = []
        collected: list[tuple[Collected, Mesh]] = []

        selection = self._new_selection()
        patterns = [sorted(self._options.only), sorted(self._options.ignore)]

        def classify() -> list[Any]:
            classified.append(classify_state(state, self._options.ties, self.bases.parts))
            hub_keys = self._options.hub_keys and classified[0].pretrained
            return [classified[0].own_owners(), patterns, hub_candidates(classified[0]) if hub_keys else []]

        answers = run_on_all_ranks(ranks, classify)
        if any(others != patterns for _, others, _ in answers):
            texts = sorted({f"only={only}, ignore={ignore}" for _, (only, ignore), _ in answers})
            raise InvalidArgument(f"the ranks must save with the same patterns, not with {'; '.join(texts)}")
        owners = merge_owners(own for own, _, _ in answers)
        found = [names for _, _, names in answers]
        candidates = first_ranks(found) if any(found) else {}

        def collect_state() -> list[Any]:
            live = replace(classified[0], owners=owners)
            mesh = live_mesh(live, ranks.world, self._options.mesh)
            own = collect(live, self._options.model_dtype, self._holders, selection, self.by_coordinate)
            own.bases = self.bases.records
            for name, entry in own.optimizers.items() if self._options.mapping is not None else ():
                refuse_nested_states(name, entry)
            collected.append((own, mesh))
            quantized = None if own.quantized is None else own.quantized.fields()
            return [quantized, None if selection is None else asdict(selection.survey(own))]

        surveys = run_on_all_ranks(ranks, collect_state)
        quantized = [states for states, _ in surveys if states is not None]
        mixed = mixed_states(quantized) if quantized else frozenset()
        if mixed != self.by_coordinate:
            self.by_coordinate = mixed
            surveys = run_on_all_ranks(ranks, collect_state)
        if selection is not None:
            selection.settle(RankSelection(**fields) for _, fields in surveys if fields is not None)
        own, mesh = collected[-1]
        self._notices.update(dict.fromkeys(own.notices, False) | self._notices)
        return self._map(ranks, own, state, candidates), mesh, owners

    def _new_selection(self) -> SaveSelection | None:
        """Make the selection of the next layout: other tensors may be tied, or left out."""
        from holdfast.adapters.saving.save_selection import SaveSelection

        only, ignore = self._options.only, self._options.ignore
        self.selection = SaveSelection(KeySelection(tuple(only), tuple(ignore))) if only or ignore else None
        return self.selection

    def _map(
        self, ranks: Ranks, collected: Collected, state: Mapping[str, Any], candidates: Mapping[str, int]
    ) -> Collected:
        """Return the state under the keys of the file. `candidates` are modules whose names on the hub may differ."""
        if self._options.mapping is None and not candidates:
            self._stored_keys = None
            return self.as_stored(collected)
        from holdfast.adapters.hub.saved_names import HubRequest
        from holdfast.adapters.saving.stored_keys import resolve_mapping

        hub = HubRequest(candidates, self._names)
        resolved = resolve_mapping(ranks, collected, self._options.mapping, state, hub, self.selection)
        self._stored_keys = resolved
        self._notices.update(dict.fromkeys(resolved.notices, False) | self._notices)
        return self.as_stored(collected)

    def as_stored(self, collected: Collected) -> Collected:
        """Return what a save writes of a state, under its keys in the checkpoint, as the last survey resolved them."""
        if self.selection is not None:
            collected = self.selection.apply(collected)
        return collected if self._stored_keys is None else self._stored_keys.map_items(collected)

    @property
    def stored_keys(self) -> StoredKeys | None:
        """How the last survey resolved a mapping; None without one."""
        return self._stored_keys

    def warn(self, ranks: Ranks) -> None:
        """Warn once about replicas that differ, and about notices of the state.

        Called after the last collective: a warning that a filter turns into an error must not
        leave other ranks waiting.
        """
        differing = frozenset(self._first_replica)
        if differing and differing != self._warned and ranks.rank == 0:
            shown = ", ".join(f"{group}: {key}" for group, key in self._first_replica[:10])
            more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
            warn(f"replicas differ between ranks, the first is saved: {shown}{more}")
        self._warned = differing
        for text in [text for text, emitted in self._notices.items() if not emitted]:
            self._notices[text] = True
            if ranks.rank == 0:
                warn(text)


def _check_coverage(agreement: Agreement, collected: Collected) -> None:
    """Raise LayoutError unless the ranks together hold all of every tensor that this rank holds a part of."""
    for item in collected.items:
        agreement.holding((item.group, item.key))
