"""The survey, first phase of a save: collect each rank's state, map its keys, agree on a layout, compare replicas."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.engine.bases import BaseChooser
from holdfast.engine.options import SaveOptions

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.saving.agreement import Agreement, TensorName
    from holdfast.adapters.saving.collect import Collected
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
        self._notices: dict[str, bool] = {}  # by text: whether it was emitted
        self.bases = BaseChooser(options)

    def survey(self, ranks: Ranks, state: MutableMapping[str, Any], target: str) -> Survey:
        """Collect the state of every rank and agree on one layout; every rank returns or raises alike."""
        from holdfast.adapters.saving.agreement import differing_replicas, plain_values

        layout = self.survey_layout(ranks, state, target)
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
        return LayoutSurvey(collected, owners, agreement)

    def _collect(self, ranks: Ranks, state: MutableMapping[str, Any]) -> tuple[Collected, Mesh, dict[str, list[str]]]:
        from holdfast.adapters.live_state import classify_state, live_mesh, merge_owners
        from holdfast.adapters.saving.collect import collect
        from holdfast.mapping.apply import refuse_nested_states

        self.bases.choose(ranks, state)
        self._notices.update(dict.fromkeys(self.bases.notices, False) | self._notices)
        classified: list[LiveState] = []
        collected: list[tuple[Collected, Mesh]] = []

        def classify() -> dict[str, list[str]]:
            classified.append(classify_state(state, self._options.ties, self.bases.parts))
            return classified[0].own_owners()

        owners = merge_owners(run_on_all_ranks(ranks, classify))

        def collect_state() -> None:
            live = replace(classified[0], owners=owners)
            mesh = live_mesh(live, ranks.world, self._options.mesh)
            own = collect(live, self._options.model_dtype, self._holders)
            own.bases = self.bases.records
            for name, entry in own.optimizers.items() if self._options.mapping is not None else ():
                refuse_nested_states(name, entry)
            collected.append((own, mesh))

        run_on_all_ranks(ranks, collect_state)
        own, mesh = collected[0]
        self._notices.update(dict.fromkeys(own.notices, False) | self._notices)
        return self._map(ranks, own, state), mesh, owners

    def _map(self, ranks: Ranks, collected: Collected, state: Mapping[str, Any]) -> Collected:
        if self._options.mapping is None:
            return collected
        from holdfast.adapters.saving.stored_keys import resolve_mapping

        self._stored_keys = resolve_mapping(ranks, collected, self._options.mapping, state)
        return self.with_stored_keys(collected)

    def with_stored_keys(self, collected: Collected) -> Collected:
        """Return a state under its keys in the checkpoint, as the last survey mapped them."""
        return collected if self._stored_keys is None else self._stored_keys.map_items(collected)

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
