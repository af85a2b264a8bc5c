"""How the base model of PEFT adapters is stored, chosen alike on every rank before the survey of a save.

A base that came from a folder or the hub is recorded by reference, unless training changes it: a reference would lose
that. What can only be stored with the keys in memory is stored as any module.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.base_reference import base_files, base_folder
from holdfast.core.errors import HoldfastError, Mismatch, Unsupported
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.engine.base_samples import differing_key
from holdfast.engine.options import SaveOptions

if TYPE_CHECKING:
    from holdfast.adapters.peft import AdapterParts


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """The facts that one rank knows of a base model, as JSON. `differing` is None where nothing was compared."""

    problem: str  # why PEFT cannot save the adapters
    merged: str  # a layer with a merged adapter
    trained: str  # a parameter of the base that is trained
    source: str
    revision: str | None
    folder: str  # where the base is on this host, "" if it is missing
    differing: str | None
    quantized: list[str]  # how its layers are quantized in memory
    unfillable: str  # a tensor that no load can fill


@dataclass(frozen=True, slots=True)
class _BaseMode:
    """The way in which a base is stored, and the reason if it is not the expected one."""

    mode: str  # of BASE_MODES, or "" for a module stored as any other
    notice: str = ""


class BaseChooser:
    """Chooses for each module with adapters. `parts`, `records` and `notices` are those of the last choice."""

    def __init__(self, options: SaveOptions) -> None:
        self._options = options
        self._trained: dict[str, bool] = {}
        self.parts: dict[str, AdapterParts] = {}
        self.records: dict[str, Any] = {}  # those that this rank reports
        self.notices: list[str] = []

    def choose(self, ranks: Ranks, state: MutableMapping[str, Any]) -> None:
        """Choose for the modules of all ranks. Collective; raises the same error on every rank."""
        from holdfast.adapters.peft import AdapterParts

        answers = run_on_all_ranks(
            ranks,
            lambda: {name: asdict(facts) for name, facts in _facts(state, self._options).items()},
        )
        facts: dict[str, list[tuple[int, BaseFacts]]] = {}
        for rank, answer in enumerate(answers):
            for name, fields in answer.items():
                facts.setdefault(name, []).append((rank, BaseFacts(**fields)))
        choices = {name: _choose(name, [own for _, own in known], self._options) for name, known in facts.items()}
        self.notices = [choice.notice for choice in choices.values() if choice.notice]
        modes = {name: choice.mode for name, choice in choices.items() if choice.mode}
        self.parts = {name: AdapterParts(mode == "full", mode == "reference") for name, mode in modes.items()}
        first = {name: known[0][0] for name, known in facts.items()}

        def record() -> None:
            own = [name for name in modes if first[name] == ranks.rank]
            self.records = {name: _record(modes[name], [known for _, known in facts[name]]) for name in own}

        run_on_all_ranks(ranks, record)
        self._trained = {name: bool(own.trained) for name, answer in facts.items() for _, own in answer}

    def still_fit(self, state: Mapping[str, Any]) -> bool:
        """Return True unless a base model is trained that was not when the choice was made."""
        from holdfast.adapters.peft import peft_model

        for name, trained in self._trained.items():
            model = peft_model(state.get(name))
            if model is None or (not trained and self.parts.get(name) and trains_base(name, model)):
                return False
        return True


def trains_base(name: str, model: Any) -> bool:
    """Return True if a parameter that belongs to no adapter is trained."""
    from holdfast.adapters.module import view_module
    from holdfast.adapters.peft import trained_base_keys

    return bool(trained_base_keys(view_module(name, model, {})))


def _facts(state: Mapping[str, Any], options: SaveOptions) -> dict[str, BaseFacts]:
    from holdfast.adapters.base_quantization import quantization_of, unfillable_key
    from holdfast.adapters.module import view_module
    from holdfast.adapters.peft import adapter_keys, base_tensors, merged_layer, peft_model, trained_base_keys

    out = {}
    for name, value in state.items():
        model = peft_model(value)
        if model is None:
            continue
        view = view_module(name, value, options.ties)
        problem = adapter_keys(model).problem
        source, revision = base_source(model)
        folder = base_folder(source, revision)
        differing = None
        trained = "" if problem else next(iter(trained_base_keys(view)), "")
        if not problem and folder is not None and not trained and options.base in (None, "reference"):
            differing = differing_key(base_tensors(view), folder)
        where = "" if folder is None else str(folder.resolve())
        merged = merged_layer(model)
        quantized, unfillable = quantization_of(view), unfillable_key(view)
        out[name] = BaseFacts(problem, merged, trained, source, revision, where, differing, quantized, unfillable)
    return out


def base_source(model: Any) -> tuple[str, str | None]:
    """Return the folder or repository that a live base model came from and its revision; "" for neither."""
    from holdfast.adapters.peft import base_of

    base = base_of(model)
    config = getattr(base, "config", None)
    named = [getattr(base, "name_or_path", ""), getattr(config, "_name_or_path", "")]
    named += [getattr(own, "base_model_name_or_path", "") for own in model.peft_config.values()]
    source = next((str(name) for name in named if name), "")
    if source and Path(source).is_dir():
        return str(Path(source).absolute()), None
    revision = getattr(config, "_commit_hash", None)
    return source, str(revision) if revision else None


def _choose(name: str, known: list[BaseFacts], options: SaveOptions) -> _BaseMode:
    asked = options.base
    problem = next((facts.problem for facts in known if facts.problem), "")
    if options.mapping is not None and not problem:
        problem = "a mapping= names the tensors of the whole module"
    if problem and asked is not None:
        raise Unsupported(f"{name}: base={asked!r}, but {problem}; without base= the module is saved as any other")
    if problem:
        return _BaseMode(
            "",
            f"{name}: {problem}: it is saved as any module, with the keys in memory. holdfast.load opens it, "
            "from_pretrained cannot",
        )
    merged = next((facts.merged for facts in known if facts.merged), "")
    if merged:
        raise Unsupported(f"{name}: an adapter is merged into {merged}; call unmerge_adapter() before a save")
    reason, error = _reference_problem(known) if asked in (None, "reference") else ("", Unsupported)
    unfillable = next((facts.unfillable for facts in known if facts.unfillable), "")
    if asked == "reference" and reason:
        full = "" if unfillable else "base='full', or with "
        raise error(f"{name}: base='reference', but {reason}; save with {full}base='none' for the adapters only")
    mode = asked or ("full" if reason else "reference")
    if mode == "full" and unfillable:
        raise Unsupported(_unfillable_text(name, unfillable, reason or "base='full'", _quantized(known)))
    notice = f"{name}: {reason}: each step stores the whole base model; base='none' leaves it out"
    return _BaseMode(mode, notice if reason and (known[0].source or any(facts.trained for facts in known)) else "")


def _reference_problem(known: list[BaseFacts]) -> tuple[str, type[HoldfastError]]:
    """Return what a reference to the base would lose, "" if nothing, and the error if a reference was asked for."""
    folder = known[0].folder
    trained = next((facts.trained for facts in known if facts.trained), "")
    differing = next((facts.differing for facts in known if facts.differing != ""), "")
    if trained:
        return f"{trained} of the base model is trained, which a reference would lose", Unsupported
    if not known[0].source:
        return "its base model came from no folder or repository", Unsupported
    if not all(facts.folder for facts in known):
        return f"the base model is said to come from {known[0].source}, which is not on this host", Unsupported
    if differing is None:
        return f"the base model cannot be compared with {folder}: no tensors with the same keys", Unsupported
    if differing:
        return f"{differing} of the base model differs from {folder}", Mismatch
    return "", Unsupported


def _unfillable_text(name: str, key: str, reason: str, quantized: list[str]) -> str:
    how = f" (quantized as {', '.join(quantized)})" if quantized else ""
    return (
        f"{name}: {reason}, so the step would have the whole base model{how}, which no load could fill: {key} is a "
        "copy that its state_dict makes. Save with base='none' for the adapters only, or load the base model from a "
        "folder that has it unquantized, and save with base='reference'"
    )


def _quantized(known: list[BaseFacts]) -> list[str]:
    return sorted({kind for facts in known for kind in facts.quantized})


def _record(mode: str, known: list[BaseFacts]) -> dict[str, Any]:
    if mode == "full":
        return {"mode": mode}
    record: dict[str, Any] = {"mode": mode, "quantized": _quantized(known)}
    if mode == "reference":
        facts = known[0]
        record["source"] = facts.source if facts.revision else facts.folder
        record |= {"revision": facts.revision, "files": base_files(Path(facts.folder))}
    return record
