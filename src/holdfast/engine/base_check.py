"""The stored parts of models with PEFT adapters, and the check of a live base model against the recorded one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.base_reference import base_folder, check_base, find_base
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import HoldfastError, Mismatch
from holdfast.core.names import ADAPTER, BASE, BUFFERS, is_group_of
from holdfast.engine.base_samples import differing_key
from holdfast.engine.bases import base_source
from holdfast.engine.options import LoadOptions
from holdfast.sources.foreign import Foreign

if TYPE_CHECKING:
    from holdfast.adapters.live_state import LiveState
    from holdfast.adapters.peft import AdapterParts, BaseTensors


def stored_parts(checkpoint: Checkpoint, state: Mapping[str, Any]) -> dict[str, AdapterParts]:
    """Return the modules that the checkpoint stores as adapters and the state has as such, with their parts.

    The averages of a module are under "<name>/model". A selection may have left out all adapters of a module: its
    record says that the states of its optimizer have their keys.
    """
    from holdfast.adapters.peft import AdapterParts

    # A Holdfast manifest has the kinds; the contents would open files that a selection leaves out.
    groups = checkpoint.contents.groups if isinstance(checkpoint, Foreign) else checkpoint.manifest.groups
    kinds = {name: group.kind for name, group in groups.items()}
    records = {} if isinstance(checkpoint, Foreign) else checkpoint.manifest.bases
    out = {}
    for name in (text for own in state if isinstance(own, str) for text in (own, f"{own}/model")):
        own_kinds = {kind for group, kind in kinds.items() if is_group_of(group, name)}
        if ADAPTER in own_kinds or name in records:
            is_full = records.get(name, {}).get("mode") == "full"
            out[name] = AdapterParts(is_full or BASE in own_kinds, BUFFERS in own_kinds)
    return out


def live_quantization(checkpoint: Checkpoint, live: LiveState, options: LoadOptions) -> dict[str, list[str]]:
    """Return how the layers that this rank holds of each base model are quantized. A rank of a pipeline holds some."""
    from holdfast.adapters.base_quantization import quantization_of
    from holdfast.adapters.module import view_module
    from holdfast.adapters.peft import peft_model

    return {
        name: quantization_of(view_module(name, live.entries[name], options.ties))
        for name in checkpoint.manifest.bases
        if name in live.parts and peft_model(live.entries.get(name)) is not None
    }


def check_bases(
    checkpoint: Checkpoint,
    live: LiveState,
    options: LoadOptions,
    quantized: Sequence[Mapping[str, list[str]]],
    *,
    first: bool,
) -> list[str]:
    """Compare the live base models with the recorded ones; return notes on what was not compared.

    Raises NotFound for a missing base and Mismatch for a changed one; if the load is not strict, a note says so.
    Each rank compares samples of its shards; the `first` also compares the files. `quantized` has the live
    quantization on every rank.
    """
    from holdfast.adapters.module import view_module
    from holdfast.adapters.peft import base_tensors, peft_model

    notes = []
    for name, record in checkpoint.manifest.bases.items():
        model = peft_model(live.entries.get(name))
        if model is None or name not in live.parts:
            continue
        where = f"{checkpoint.path}: {name}"
        if record["mode"] == "full":
            continue
        view = view_module(name, live.entries[name], options.ties)
        kinds = {kind for on_rank in quantized for kind in on_rank.get(name, ())}
        other = _other_quantization(record, sorted(kinds))
        if record["mode"] == "none":
            notes.append(f"{name}: the checkpoint does not say which base model the adapters belong to")
            notes += [f"{name}: {other}"] if other else []
            continue
        try:
            if other:
                raise Mismatch(f"{where}: {other}, or pass strict=False to load the adapters onto this one")
            folder = find_base(record, base_folder(*base_source(model)), where)
            if first:
                check_base(record, folder, where, digests=options.verify)
            _compare(base_tensors(view), folder, where)
        except HoldfastError as error:
            if options.strict:
                raise
            notes.append(str(error))
    return notes


def _other_quantization(record: Mapping[str, Any], live: list[str]) -> str:
    """Return how the quantization of a live base differs from the recorded one, and the way out; "" if it does not."""
    saved = record.get("quantized")
    if saved is None or live == saved:
        return ""
    texts = [f"quantized as {', '.join(kinds)}" if kinds else "not quantized" for kinds in (saved, live)]
    way_out = "quantize it in the same way before the load" if saved else "load it unquantized"
    return f"the adapters were trained on a base model that is {texts[0]}, and the live one is {texts[1]}; {way_out}"


def _compare(tensors: BaseTensors, folder: Path, where: str) -> None:
    differing = differing_key(tensors, folder)
    if differing:
        raise Mismatch(
            f"{where}: {differing} of the live base model differs from {folder}; load the base model before the "
            "adapters, or pass strict=False to load them onto this one"
        )
