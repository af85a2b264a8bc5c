"""The wants of a load, gathered from all ranks, and the fit: missing, unexpected, mismatched, unused patterns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.equal_scalars import require_same
from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.base_check import check_bases, live_quantization, stored_parts
from holdfast.engine.options import LoadOptions
from holdfast.engine.stored_names import StoredNames, stored_names
from holdfast.mapping.apply import MappedContents
from holdfast.plan.contents import Contents, KeySelection

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.loading.targets import Targets


@dataclass(frozen=True, slots=True)
class RankWants:
    """One rank's wants and mismatches, as the ranks exchange them. All fields are JSON."""

    host: str
    attempt: str
    agreed_options: Sequence[str]  # those that must be the same on every rank
    mappable: bool
    owners: Mapping[str, list[str]]  # the modules that each optimizer of the rank spans
    used_patterns: Sequence[str]
    groups: Sequence[str]
    live_parts: Mapping[str, Mapping[str, str]]  # digests of live states that the loaded ones follow
    value_entries: int  # entries with values other than tensors
    non_persistent: Sequence[str]
    wanted: Sequence[str]
    loaded: Sequence[str]
    missing: Sequence[str]
    mismatched: Sequence[str]
    cast: Sequence[str]
    computed: Sequence[str]
    on_meta: Sequence[str]
    boxes: Sequence[Sequence[Any]]  # a file, a key in the file, and the wanted boxes

    def fields(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> RankWants:
        return RankWants(**fields)


@dataclass(frozen=True, slots=True)
class LoadWants:
    """This rank's targets in its live state, and the wants of all ranks."""

    targets: Targets
    ranks: tuple[RankWants, ...]
    names: StoredNames

    @property
    def checkpoint(self) -> Checkpoint:
        checkpoint = self.targets.requests.checkpoint
        assert isinstance(checkpoint, Checkpoint)
        return checkpoint

    @property
    def contents(self) -> Contents:
        return self.targets.requests.contents

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of all ranks."""
        return tuple(wants.host for wants in self.ranks)

    @property
    def mappable(self) -> bool:
        """True if every rank can map the files into its memory."""
        return all(wants.mappable for wants in self.ranks)

    def texts(self, field: str) -> tuple[str, ...]:
        """Return the texts of a field over all ranks, sorted, each once."""
        return tuple(sorted({text for wants in self.ranks for text in getattr(wants, field)}))


@dataclass(frozen=True, slots=True)
class Fit:
    """How the live state of all ranks fits the checkpoint; keys are "group: key"."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    cast: tuple[str, ...]
    non_persistent: tuple[str, ...]
    computed: tuple[str, ...]
    on_meta: tuple[str, ...]
    unknown: tuple[str, ...]  # a line for each live group of which the checkpoint has nothing


def collect_wants(
    ranks: Ranks, opener: Callable[[], Checkpoint], state: MutableMapping[str, Any], options: LoadOptions
) -> LoadWants:
    """Open the checkpoint on every rank and match it with the live state. Collective; touches no tensor."""
    from holdfast.adapters.live_state import classify_state, merge_owners

    opened: list[tuple[Checkpoint, LiveState]] = []

    def open_first() -> dict[str, list[str]]:
        checkpoint = opener()
        live = classify_state(state, options.ties, stored_parts(checkpoint, state))
        opened.append((checkpoint, live))
        return live_quantization(checkpoint, live, options)

    quantized = run_on_all_ranks(ranks, open_first)
    names = stored_names(ranks, *opened[0], options)
    wants = _collect(ranks, lambda: opened[0][0], state, options, {}, names, quantized)
    owners = merge_owners(answer.owners for answer in wants.ranks)
    if any(answer.owners.get(name, merged) != merged for answer in wants.ranks for name, merged in owners.items()):
        # An optimizer spans modules that some rank does not hold: its keys on that rank change.
        wants = _collect(ranks, opener, state, options, owners, names, quantized)
    if len({answer.attempt for answer in wants.ranks}) > 1:
        raise HoldfastError(f"{wants.checkpoint.path}: the ranks see different checkpoints under this name")
    asked = sorted({tuple(answer.agreed_options) for answer in wants.ranks})
    if len(asked) > 1:
        texts = "; ".join(", ".join(options) for options in asked)
        raise InvalidArgument(f"the ranks must load with the same options, not with {texts}")
    wants.targets.compare_live([answer.live_parts for answer in wants.ranks])
    return wants


def _collect(
    ranks: Ranks,
    opener: Callable[[], Checkpoint],
    state: MutableMapping[str, Any],
    options: LoadOptions,
    owners: dict[str, list[str]],
    names: StoredNames,
    quantized: Sequence[Mapping[str, list[str]]],
) -> LoadWants:
    import torch

    from holdfast.adapters.live_state import classify_state, live_mesh
    from holdfast.adapters.loading.meta_tensors import MetaTensors, parse_device
    from holdfast.adapters.loading.targets import Targets
    from holdfast.adapters.loading.wants import LoadRequests

    own: list[Targets] = []

    @torch.no_grad()  # DTensor.to_local and detach are cheap then
    def collect() -> dict[str, Any]:
        checkpoint = opener()
        parts = stored_parts(checkpoint, state)
        live = replace(classify_state(state, options.ties, parts), owners=owners)
        mesh = live_mesh(live, ranks.world, options.mesh)
        selection = options.key_selection()
        if selection.only or selection.ignore:
            checkpoint.skip_damaged_files(_selects_stored(selection, names))
        mapped = _map_contents(checkpoint, options, names, live, selection, check=ranks.rank == 0)
        meta = MetaTensors(parse_device(options.device), [view.module for view in live.modules.values()])
        requests = LoadRequests(checkpoint, mapped.contents, selection, cast=options.cast, kept=mapped.kept, meta=meta)
        targets = Targets(live, requests, mesh, ranks.rank, ranks.world)
        targets.find(state)
        if checkpoint.manifest.bases:
            targets.base_notes = check_bases(checkpoint, live, options, quantized, first=ranks.rank == 0)
        own.append(targets)
        return RankWants(
            host=ranks.host(),
            attempt=checkpoint.manifest.attempt,
            agreed_options=[f"verify={options.verify!r}", f"read_once={options.read_once!r}"],
            mappable=checkpoint.mappable,
            owners=live.own_owners(),
            used_patterns=sorted(selection.used),
            groups=targets.groups,
            live_parts=targets.live_parts,
            value_entries=targets.count_value_entries(),
            non_persistent=targets.not_stored,
            **asdict(requests.findings),
            boxes=list(targets.describe()),
        ).fields()

    answers = run_on_all_ranks(ranks, collect)
    return LoadWants(own[0], tuple(map(RankWants.from_fields, answers)), names)


def _selects_stored(selection: KeySelection, names: StoredNames) -> Callable[..., bool]:
    """Return a selection by stored keys: patterns speak of names in memory, so all of a renamed state counts."""
    return (lambda *stored: True) if names.programs else selection.selects


def _map_contents(
    checkpoint: Checkpoint,
    options: LoadOptions,
    names: StoredNames,
    live: LiveState,
    selection: KeySelection,
    *,
    check: bool,
) -> MappedContents:
    """Return the contents of the checkpoint under the keys of the live state."""
    from holdfast.adapters.huggingface import config_of
    from holdfast.adapters.loading.mapped_targets import map_stored

    if options.mapping is None and not names.programs:
        return MappedContents(checkpoint.contents)
    stored = checkpoint.config()

    def config(module: str) -> Mapping[str, Any] | None:
        return stored or (config_of(live.modules[module].module) if module in live.modules else None)

    mapped = map_stored(
        checkpoint.contents,
        options.mapping,
        names.live,
        config,
        names.programs,
        reverse=options.reverse,
        partial=bool(options.of_run),
        lenient=lambda module, key: not options.strict or not selection.selects(module, key),
    )
    if check:
        require_same(checkpoint, mapped.equal_scalars)
    return mapped


def check_fit(wants: LoadWants, options: LoadOptions) -> Fit:
    """Compare the live state with the checkpoint; raises Mismatch, alike on every rank."""
    groups = wants.texts("groups")
    missing = wants.texts("missing")
    fit = Fit(
        loaded=wants.texts("loaded"),
        missing=missing,
        unexpected=tuple(wants.targets.unexpected(set(wants.texts("wanted")), groups)),
        mismatched=wants.texts("mismatched"),
        cast=wants.texts("cast"),
        non_persistent=wants.texts("non_persistent"),
        computed=wants.texts("computed"),
        on_meta=wants.texts("on_meta"),
        unknown=tuple(_unknown_groups(wants.contents, groups, missing)),
    )
    _require_used_patterns(wants, options)
    if options.strict:
        _require_exact(wants.checkpoint.path, fit)
    elif not fit.loaded and not any(answer.value_entries for answer in wants.ranks):
        _require_some(wants.checkpoint.path, fit)
    return fit


def _require_used_patterns(wants: LoadWants, options: LoadOptions) -> None:
    """Raise if a pattern matches no key: it would silently load nothing, or everything."""
    requests = wants.targets.requests
    used = set(wants.texts("used_patterns"))
    unused = [pattern for pattern in (*options.only, *options.ignore) if pattern not in used]
    unused = [pattern for pattern in unused if pattern not in options.of_run]
    if unused:
        for group, members in requests.contents.groups.items():
            for key in members.tensors:
                requests.choice.selects(group, key)
        unused = [pattern for pattern in unused if pattern not in requests.choice.used]
    if unused:
        raise Mismatch(
            f"{requests.checkpoint.path}: the pattern {unused[0]!r} fits no key; a pattern fits a key such as "
            f"'layers.*', 'group/key', or a whole group: {', '.join(requests.contents.groups)}"
        )


def _unknown_groups(contents: Contents, groups: Sequence[str], missing: Sequence[str]) -> list[str]:
    stored = {*contents.groups, *contents.state}
    has = ", ".join(sorted(stored)) or "nothing"
    lost = {text.split(":", 1)[0] for text in missing if ": no such entry" not in text}
    return [f"{name}: no such group; the checkpoint has {has}" for name in groups if name in lost - stored]


def _require_exact(path: str, fit: Fit) -> None:
    from holdfast.adapters.loading.targets import raise_mismatch

    problems = [*fit.unknown, *fit.mismatched]
    problems += [f"missing in the checkpoint: {text}" for text in fit.missing]
    problems += [f"not in the live state: {text}" for text in fit.unexpected]
    if problems:
        raise_mismatch(problems, path)


def _require_some(path: str, fit: Fit) -> None:
    """Raise if nothing of the live state is in the checkpoint, unless nothing was requested."""
    lost = [*fit.unknown, *fit.mismatched, *(f"missing in the checkpoint: {text}" for text in fit.missing)]
    if not lost:
        return
    stored = [f"not in the live state: {text}" for text in fit.unexpected]
    more = f"\n  ... and {len(lost) - 20} more" if len(lost) > 20 else ""
    raise Mismatch(
        f"{path} has nothing that fits the live state; nothing was loaded:\n  "
        + "\n  ".join(lost[:20])
        + more
        + "".join(f"\n  {text}" for text in stored[:20])
        + "\nis it the right checkpoint, and are its names those of the state? mapping= gives them others"
    )
