"""The survey: what all ranks hold, agreed on and compared. The first half of every save's way."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.core import limits
from holdfast.core.errors import InvalidArgument
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.warnings import warn
from holdfast.format.dtypes import model_dtype_named
from holdfast.mapping.per_module import check_mapping

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.saving.agreement import Agreement, TensorName
    from holdfast.adapters.saving.collected import Collected
    from holdfast.adapters.saving.mapped import StoredKeys
    from holdfast.adapters.tensors import Holders
    from holdfast.layout.mesh import Mesh
    from holdfast.plan.state_values import RankValue


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How a state is saved. `max_shard_size` and `block_bytes` are part of the canonical bytes."""

    max_shard_size: int | str = limits.MAX_SHARD_BYTES
    block_bytes: int = limits.BLOCK_BYTES
    model_dtype: str | None = None
    ties: Mapping[str, str] = field(default_factory=dict)
    replicas: str = "error"
    mesh: Any = None
    mapping: Any = None  # a program, or one by module name
    whole_files: bool = False  # what the storage wants: see Storage.whole_files

    @property
    def max_shard_bytes(self) -> int:
        return limits.parse_bytes(self.max_shard_size)

    def __post_init__(self) -> None:
        limits.parse_bytes(self.max_shard_size)
        if self.mapping is not None:
            check_mapping(self.mapping)
        if (dtype := model_dtype_named(self.model_dtype)) is not None:
            object.__setattr__(self, "model_dtype", dtype.name)
        pairs = self.ties.items() if isinstance(self.ties, Mapping) else [(self.ties,)]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise InvalidArgument(f"ties={self.ties!r} is not a mapping of keys to keys")
        if self.replicas not in ("error", "first"):
            raise InvalidArgument(f"replicas={self.replicas!r}: choose 'error' or 'first'")
        if self.block_bytes % limits.PAGE_BYTES or self.block_bytes <= 0:
            raise InvalidArgument(f"block_bytes={self.block_bytes} is not a multiple of {limits.PAGE_BYTES}")


@dataclass(frozen=True, slots=True)
class Seen:
    """One survey: this rank's state, what all agreed on, and the tensors of which the first replica counts."""

    collected: Collected
    owners: Mapping[str, list[str]]  # of all ranks: the modules that each optimizer spans
    agreement: Agreement
    told: Mapping[str, RankValue]
    first_replica: tuple[TensorName, ...]


class Survey:
    """Takes surveys, and remembers which replicas were compared: it is done when tensors come or go."""

    def __init__(self, options: SaveOptions, holders: Holders | None = None) -> None:
        self._options = options
        self._holders = holders
        self._compared: frozenset[TensorName] | None = None
        self._first_replica: tuple[TensorName, ...] = ()
        self._warned: frozenset[TensorName] = frozenset()
        self._stored_keys: StoredKeys | None = None
        self._notices: dict[str, bool] = {}  # by text: whether it was said

    def take(self, ranks: Ranks, state: MutableMapping[str, Any], target: str) -> Seen:
        """Look at the state on every rank and agree on one layout; every rank returns or raises alike."""
        from holdfast.adapters.saving.agreement import differing_replicas, plain_values

        collected, owners, agreement = self.layout(ranks, state, target)
        names_now = frozenset(agreement.tensors)
        own = collected.by_name()
        if self._compared != names_now:
            self._first_replica = tuple(differing_replicas(ranks, agreement, own, self._options.replicas))
            self._compared = names_now
        elif self._options.replicas == "error" and ranks.world > 1:
            differing_replicas(ranks, agreement, plain_values(own), self._options.replicas)
        return Seen(collected, owners, agreement, collected.value_reports(agreement.partitioned), self._first_replica)

    def layout(
        self, ranks: Ranks, state: MutableMapping[str, Any], target: str
    ) -> tuple[Collected, dict[str, list[str]], Agreement]:
        """What all ranks hold, without comparing replicas."""
        from holdfast.adapters.saving.agreement import agree

        collected, mesh, owners = self._collect(ranks, state)
        agreement = agree(ranks, collected, mesh, target)
        run_on_all_ranks(ranks, lambda: _check_cover(agreement, collected))
        return collected, owners, agreement

    def _collect(self, ranks: Ranks, state: MutableMapping[str, Any]) -> tuple[Collected, Mesh, dict[str, list[str]]]:
        from holdfast.adapters.live_state import classify_state, live_mesh, merge_owners
        from holdfast.adapters.saving.collect import collect

        sorted_state: list[LiveState] = []
        found: list[tuple[Collected, Mesh]] = []

        def sort() -> dict[str, list[str]]:
            sorted_state.append(classify_state(state, self._options.ties))
            return sorted_state[0].own_owners()

        owners = merge_owners(run_on_all_ranks(ranks, sort))

        def work() -> None:
            live = replace(sorted_state[0], owners=owners)
            mesh = live_mesh(live, ranks.world, self._options.mesh)
            found.append((collect(live, self._options.model_dtype, self._holders), mesh))

        run_on_all_ranks(ranks, work)
        collected, mesh = found[0]
        self._notices.update(dict.fromkeys(collected.notices, False) | self._notices)
        return self._map(ranks, collected, state), mesh, owners

    def _map(self, ranks: Ranks, collected: Collected, state: Mapping[str, Any]) -> Collected:
        """What is held under the keys of the file, if there is a mapping."""
        if self._options.mapping is None:
            return collected
        from holdfast.adapters.saving.mapped import resolve_mapping

        self._stored_keys = resolve_mapping(ranks, collected, self._options.mapping, state)
        return self.stored(collected)

    def stored(self, collected: Collected) -> Collected:
        """This rank's state under the keys of the file, as the last survey worked them out."""
        return collected if self._stored_keys is None else self._stored_keys.map_items(collected)

    def warn(self, ranks: Ranks) -> None:
        """Say once which replicas differ, and what else a user should know of the state.

        After the last word between ranks: a warning that is made an error must not leave others waiting.
        """
        names_now = frozenset(self._first_replica)
        if names_now and names_now != self._warned and ranks.rank == 0:
            shown = ", ".join(f"{group}: {key}" for group, key in self._first_replica[:10])
            more = f" and {len(names_now) - 10} more" if len(names_now) > 10 else ""
            warn(f"replicas differ between ranks, the first is saved: {shown}{more}")
        self._warned = names_now
        for text in [text for text, said in self._notices.items() if not said]:
            self._notices[text] = True
            if ranks.rank == 0:
                warn(text)


def _check_cover(agreement: Agreement, collected: Collected) -> None:
    """Every tensor that this rank holds a part of is held whole by the ranks together; raises LayoutError."""
    for item in collected.items:
        agreement.holding((item.group, item.key))
