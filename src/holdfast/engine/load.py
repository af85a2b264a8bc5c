"""The way of a load: open, find where everything goes, plan, read, hand over. Collective."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.checkpoint import Checkpoint, no_progress
from holdfast.checkpoint.equal_scalars import require_same
from holdfast.checkpoint.reading import MAP_BYTES, PORTION_BYTES, Loading
from holdfast.core.errors import HoldfastError, InvalidArgument, Mismatch
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.layout.box import Box
from holdfast.mapping.apply import MappedContents
from holdfast.plan.contents import Contents
from holdfast.plan.key_patterns import KeySelection
from holdfast.plan.load import Read, Want, plan_load

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.loading.module_targets import Incompatible
    from holdfast.adapters.loading.targets import Targets


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is loaded and how strictly. Patterns are shell-like and fit a key or "group/key"."""

    strict: bool = True
    verify: bool = True
    cast: bool = False
    only: Sequence[str] = ()
    ignore: Sequence[str] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    mesh: Any = None
    mapping: Any = None  # a program, or one by module name
    reverse: bool = False  # the mapping is the one that the checkpoint was saved through


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did, the same on every rank but for the bytes and seconds, which are this rank's.

    `non_persistent` names buffers that were registered with persistent=False: the load left them as they
    are. After `to_empty` they hold no values at all: compute them anew.
    """

    step: int | None
    path: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    mismatched: tuple[str, ...]
    cast: tuple[str, ...]
    notes: tuple[str, ...]
    values: int
    verified: bool
    needed_bytes: int
    read_bytes: int
    seconds: float
    non_persistent: tuple[str, ...] = ()  # buffers of the live modules that no checkpoint holds

    def __str__(self) -> str:
        parts = [f"loaded {len(self.loaded)} tensors and {self.values} other values of {self.path}"]
        for name in ("missing", "unexpected", "mismatched", "cast", "notes"):
            found = getattr(self, name)
            if found:
                parts.append(f"{name}: " + "; ".join(found[:5]) + (" ..." if len(found) > 5 else ""))
        if self.non_persistent:
            more = " ..." if len(self.non_persistent) > 5 else ""
            parts.append(f"not stored, left as they are: {'; '.join(self.non_persistent[:5])}{more}")
        return "\n".join(parts)


def load_checkpoint(
    ranks: Ranks,
    opener: Callable[[], Checkpoint],
    state: MutableMapping[str, Any],
    options: LoadOptions,
    progress: Callable[[int], None] = no_progress,
    *,
    deadline_s: float,
    touched: set[str] | None = None,
) -> LoadReport:
    """Load a checkpoint into the live state; every rank returns or raises alike.

    `touched` gets the names of the groups of which any rank has overwritten something.
    """
    from holdfast.capture.hooks import wait_for_captures

    started = time.perf_counter()
    wait_for_captures()
    with ExitStack() as stack:

        def open_held() -> Checkpoint:
            checkpoint = opener()
            stack.enter_context(checkpoint.held())
            return checkpoint

        report = _load(ranks, open_held, state, options, progress, deadline_s, set() if touched is None else touched)
    return replace(report, seconds=time.perf_counter() - started)


def _load(
    ranks: Ranks,
    opener: Callable[[], Checkpoint],
    state: MutableMapping[str, Any],
    options: LoadOptions,
    progress: Callable[[int], None],
    deadline_s: float,
    touched: set[str],
) -> LoadReport:
    targets, answers = _find(ranks, opener, state, options)
    checkpoint = targets.requests.checkpoint
    assert isinstance(checkpoint, Checkpoint)
    findings = {
        kind: tuple(sorted({text for answer in answers for text in answer[kind]}))
        for kind in ("missing", "mismatched", "cast", "wanted", "loaded", "used", "non_persistent")
    }
    groups = sorted({group for answer in answers for group in answer["groups"]})
    unexpected = tuple(targets.unexpected(set(findings["wanted"]), groups))
    _require_used(targets, options, set(findings["used"]))
    contents = targets.requests.contents
    unknown = _unknown_names(contents, groups, findings["missing"])
    if options.strict:
        _require_fit(checkpoint.path, findings, unexpected, unknown)
    elif not findings["loaded"] and not any(answer["given"] for answer in answers):
        _require_filled(checkpoint.path, findings, unexpected, unknown)
    mappable = all(answer["mappable"] for answer in answers)
    portion_bytes = MAP_BYTES if mappable else PORTION_BYTES
    reads, neighbours = _plan(ranks, contents, answers, verify=options.verify, portion_bytes=portion_bytes)
    loading = Loading(ranks, checkpoint, targets.requests.destinations, progress)
    result = loading.run_mapped(reads) if mappable else loading.run_read(reads, neighbours, deadline_s)
    touched.update(*ranks.gather(_groups_of(contents, result.touched)))
    from holdfast.adapters.loading.module_targets import Incompatible

    finished = _finish(ranks, targets, result.failure, Incompatible(list(findings["missing"]), list(unexpected)))
    if options.strict and (finished.missing or finished.unexpected):
        texts = [f"missing: {text}" for text in finished.missing]
        texts += [f"unexpected: {text}" for text in finished.unexpected]
        raise Mismatch(
            f"{checkpoint.path} was loaded, but load_state_dict post-hooks of the modules say:\n  " + "\n  ".join(texts)
        )
    verified = options.verify and all(read.digest is not None for read in reads)
    return LoadReport(
        step=checkpoint.step,
        path=checkpoint.path,
        loaded=findings["loaded"],
        missing=finished.missing,
        unexpected=finished.unexpected,
        mismatched=findings["mismatched"],
        cast=findings["cast"],
        notes=(*finished.notes, *checkpoint.notes),
        values=targets.values,
        verified=verified,
        needed_bytes=sum(box.volume * place.spec.dtype.bytes for place, box in targets.requests.destinations),
        read_bytes=result.read_bytes,
        seconds=0.0,
        non_persistent=findings["non_persistent"],
    )


def _groups_of(contents: Contents, files: Collection[str]) -> list[str]:
    """The groups that have tensors in these files."""
    out = []
    for name, group in contents.groups.items():
        if any(place.file in files for recipe in group.tensors.values() for place in recipe.sources()):
            out.append(name)
    return out


def _find(
    ranks: Ranks, opener: Callable[[], Checkpoint], state: MutableMapping[str, Any], options: LoadOptions
) -> tuple[Targets, list[dict[str, Any]]]:
    """This rank's targets, and what all ranks said of theirs."""
    from holdfast.adapters.live_state import merge_owners

    aims = _aims(ranks, state, options)
    targets, answers = _find_with(ranks, opener, state, options, {}, aims)
    owners = merge_owners(answer["owners"] for answer in answers)
    if any(answer["owners"].get(name, of_all) != of_all for answer in answers for name, of_all in owners.items()):
        # An optimizer spans modules that some rank does not hold: its keys there are named anew.
        targets, answers = _find_with(ranks, opener, state, options, owners, aims)
    if len({answer["attempt"] for answer in answers}) > 1:
        raise HoldfastError(f"{targets.requests.checkpoint.path}: the ranks see different checkpoints under this name")
    return targets, answers


def _find_with(
    ranks: Ranks,
    opener: Callable[[], Checkpoint],
    state: MutableMapping[str, Any],
    options: LoadOptions,
    owners: dict[str, list[str]],
    aims: Sequence[Mapping[str, Any]],
) -> tuple[Targets, list[dict[str, Any]]]:
    from holdfast.adapters.live_state import classify_state, live_mesh
    from holdfast.adapters.loading.targets import Targets
    from holdfast.adapters.loading.wants import LoadRequests

    found: list[Targets] = []

    def work() -> dict[str, Any]:
        checkpoint = opener()
        live = replace(classify_state(state, options.ties), owners=owners)
        mesh = live_mesh(live, ranks.world, options.mesh)
        choice = KeySelection(_patterns(options.only), _patterns(options.ignore))
        if choice.only or choice.ignore:
            checkpoint.skip_damaged_files(choice.selects)
        mapped = _mapped(checkpoint, options, aims, live, choice, check=ranks.rank == 0)
        requests = LoadRequests(checkpoint, mapped.contents, choice, cast=options.cast, kept=mapped.kept)
        targets = Targets(live, requests, mesh, ranks.rank, ranks.world)
        targets.find(state)
        found.append(targets)
        return {
            "host": ranks.host(),
            "attempt": checkpoint.manifest.attempt,
            "mappable": checkpoint.mappable,
            "owners": live.own_owners(),
            "used": sorted(choice.used),
            "groups": targets.groups,
            "given": targets.count_value_entries(),
            "non_persistent": targets.not_stored,
            **asdict(requests.findings),
            "boxes": list(targets.describe()),
        }

    answers = run_on_all_ranks(ranks, work)
    return found[0], answers


def _aims(ranks: Ranks, state: MutableMapping[str, Any], options: LoadOptions) -> list[dict[str, Any]]:
    """The tensors and ties of all ranks, if a mapping has to know them."""
    from holdfast.adapters.live_state import classify_state
    from holdfast.adapters.saving.mapped import describe_targets

    if options.mapping is None:
        return []
    return run_on_all_ranks(ranks, lambda: describe_targets(classify_state(state, options.ties)))


def _mapped(
    checkpoint: Checkpoint,
    options: LoadOptions,
    aims: Sequence[Mapping[str, Any]],
    live: LiveState,
    choice: KeySelection,
    *,
    check: bool,
) -> MappedContents:
    """What the checkpoint holds, under the keys of the live state."""
    from holdfast.adapters.saving.mapped import config_of, map_stored

    if options.mapping is None:
        return MappedContents(checkpoint.contents)
    stored = checkpoint.config()

    def config(module: str) -> Mapping[str, Any] | None:
        return stored or (config_of(live.modules[module].module) if module in live.modules else None)

    mapped = map_stored(
        checkpoint.contents,
        options.mapping,
        aims,
        config,
        reverse=options.reverse,
        lenient=lambda module, key: not options.strict or not choice.selects(module, key),
    )
    if check:
        require_same(checkpoint, mapped.equal_scalars)
    return mapped


def _patterns(given: Sequence[str]) -> tuple[str, ...]:
    """Patterns of keys as a tuple; one text alone is refused, since it is a sequence of letters too."""
    if isinstance(given, str):
        raise InvalidArgument(f"patterns are a list of texts: write [{given!r}]")
    return tuple(given)


def _require_used(targets: Targets, options: LoadOptions, used: set[str]) -> None:
    """A pattern that fits nothing is a mistake: it would load nothing, or everything, without a word."""
    requests = targets.requests
    unused = [pattern for pattern in (*options.only, *options.ignore) if pattern not in used]
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


def _unknown_names(contents: Contents, groups: Sequence[str], missing: Sequence[str]) -> list[str]:
    """A line for each group of the live state of which the checkpoint has nothing, with the names that it has."""
    stored = {*contents.groups, *contents.state}
    has = ", ".join(sorted(stored)) or "nothing"
    lost = {text.split(":", 1)[0] for text in missing if ": no such entry" not in text}
    return [f"{name}: no such group; the checkpoint has {has}" for name in groups if name in lost - stored]


def _require_fit(
    path: str, findings: Mapping[str, Sequence[str]], unexpected: Sequence[str], unknown: Sequence[str]
) -> None:
    from holdfast.adapters.loading.targets import raise_mismatch

    problems = [*unknown, *findings["mismatched"]]
    problems += [f"missing in the checkpoint: {text}" for text in findings["missing"]]
    problems += [f"not in the live state: {text}" for text in unexpected]
    if problems:
        raise_mismatch(problems, path)


def _require_filled(
    path: str, findings: Mapping[str, Sequence[str]], unexpected: Sequence[str], unknown: Sequence[str]
) -> None:
    """Nothing of the state was found: that is an error whatever was asked, unless nothing was asked for."""
    lost = [*unknown, *findings["mismatched"], *(f"missing in the checkpoint: {text}" for text in findings["missing"])]
    if not lost:
        return
    stored = [f"not in the live state: {text}" for text in unexpected]
    more = f"\n  ... and {len(lost) - 20} more" if len(lost) > 20 else ""
    raise Mismatch(
        f"{path} has nothing that fits the live state; nothing was loaded:\n  "
        + "\n  ".join(lost[:20])
        + more
        + "".join(f"\n  {text}" for text in stored[:20])
        + "\nis it the right checkpoint, and are its names those of the state? mapping= gives them others"
    )


def _plan(
    ranks: Ranks, contents: Contents, answers: Sequence[Mapping[str, Any]], *, verify: bool, portion_bytes: int
) -> tuple[tuple[Read, ...], list[int]]:
    """The reads of this host, from what its ranks want, and those ranks."""
    here = answers[ranks.rank]["host"]
    neighbours = [rank for rank, answer in enumerate(answers) if answer["host"] == here]
    places = {(place.file, place.spec.key): place for file in contents.files for place in file.places}
    wants = []
    for rank in neighbours:
        for file, key, boxes in answers[rank]["boxes"]:
            place = places[file, key]
            dims = len(place.spec.shape)
            wants += [Want(place, Box(tuple(box[:dims]), tuple(box[dims:])), rank) for box in boxes]
    return plan_load(contents.files, wants, verify=verify, portion_bytes=portion_bytes), neighbours


@dataclass(frozen=True, slots=True)
class _Finished:
    """What hooks of the modules left of the misfits, and what is worth knowing."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    notes: tuple[str, ...] = ()


def _finish(ranks: Ranks, targets: Targets, failure: HoldfastError | None, incompatible: Incompatible) -> _Finished:
    """Once every rank has read all it wants, hand over what is not filled in place."""

    def work() -> bool:
        if failure is not None:
            raise failure
        return targets.has_actions

    if not any(run_on_all_ranks(ranks, work)):
        return _Finished(tuple(incompatible.missing), tuple(incompatible.unexpected))
    answers = run_on_all_ranks(ranks, lambda: targets.finish(incompatible))
    merged = {kind: tuple(sorted({text for answer in answers for text in answer[kind]})) for kind in answers[0]}
    return _Finished(**merged)
