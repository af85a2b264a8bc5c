"""The names on the hub that a save writes: derived on one rank for the tensors of all, and sent to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.adapters.hub.mappings import loading_mapping, saving_mapping
from holdfast.adapters.hub.rules import Shapes, has_rules, is_convertible
from holdfast.adapters.hub.traced_tensor import UntracedOperation
from holdfast.adapters.live_state import LiveState
from holdfast.adapters.module import unwrap
from holdfast.core.ranks import Ranks, run_on_all_ranks


@dataclass(frozen=True, slots=True)
class HubRequest:
    """The modules whose names may differ on the hub, each with the rank that derives them.

    `kept` are the names of the step that a run restored, by module: a mapping, or "" for the names in memory.
    """

    candidates: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)


def hub_candidates(live: LiveState) -> list[str]:
    """Return the modules of this rank whose names may differ on the hub."""
    return [name for name in live.pretrained if has_rules(live.modules[name].module)]


def convertible_modules(live: LiveState) -> list[str]:
    """Return the modules of this rank that may read files of other tools by conversion rules."""
    return [name for name in live.pretrained if is_convertible(live.modules[name].module)]


def first_ranks(candidates: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return for every candidate of any rank the first rank that holds it."""
    out: dict[str, int] = {}
    for rank, names in enumerate(candidates):
        for name in names:
            out.setdefault(name, rank)
    return dict(sorted(out.items()))


def derive_names(
    ranks: Ranks, state: Mapping[str, Any], candidates: Mapping[str, int], shapes: Mapping[str, Shapes]
) -> tuple[dict[str, str], dict[str, str]]:
    """Derive the mappings of the candidates from the tensors of all ranks, "" where names stay. Collective.

    The second result says for modules without a mapping what prevents one.
    """

    def derive() -> list[dict[str, str]]:
        texts: dict[str, str] = {}
        problems: dict[str, str] = {}
        for name in (name for name, rank in candidates.items() if rank == ranks.rank):
            try:
                texts[name] = saving_mapping(unwrap(state[name]), shapes[name])
            except UntracedOperation as error:
                problems[name] = str(error)
        return [texts, problems]

    answers = run_on_all_ranks(ranks, derive)
    texts = {name: text for answer in answers for name, text in answer[0].items()}
    return texts, {name: problem for answer in answers for name, problem in answer[1].items()}


def unopenable(
    ranks: Ranks, state: Mapping[str, Any], candidates: Mapping[str, int], shapes: Mapping[str, Shapes]
) -> list[str]:
    """Return the candidates whose names in memory from_pretrained does not read as they are. Collective."""

    def check() -> list[str]:
        own = [name for name, rank in candidates.items() if rank == ranks.rank]
        return [name for name in own if not _opens(unwrap(state[name]), shapes[name])]

    return sorted(name for answer in run_on_all_ranks(ranks, check) for name in answer)


def _opens(module: Any, shapes: Shapes) -> bool:
    try:
        return not loading_mapping(module, shapes, shapes)
    except UntracedOperation:
        return False


def fallback_notice(module: str, problem: str, *, opens: bool) -> str:
    """Return the warning about a module that is stored under its names in memory."""
    consequence = "" if opens else "; from_pretrained does not open those, so no config.json is written"
    return (
        f"{module}: stored under the names that its tensors have in memory, not those on the hub: no mapping "
        f"expresses what transformers does ({problem}){consequence}"
    )
