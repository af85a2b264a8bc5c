"""The record of a merge: the inputs with their digests, the method with its parameters, and what was removed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.core import limits, names
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.core.threads import run_on_threads
from holdfast.format.digest import Digest, digest_hex
from holdfast.merging.merge_options import MergeOptions
from holdfast.merging.merge_plan import MergePlan
from holdfast.merging.model_input import InputModel
from holdfast.merging.parameter_settings import Settings
from holdfast.version import __version__

_PORTION_BYTES = 4 * limits.MIB


def input_digests(plan: MergePlan, ranks: Ranks, threads: int) -> list[dict[str, str]]:
    """Return the digests of the files of every model. The ranks share the files.

    The manifest of a Holdfast checkpoint covers its files, which are verified while they are read.
    """
    files = [(number, name) for number, model in enumerate(plan.models) for name in _recorded(model)]
    own = files[ranks.rank :: ranks.world]
    found: list[list[Any]] = []

    def work(tasks: Iterator[tuple[int, str]]) -> None:
        buffer = memoryview(bytearray(_PORTION_BYTES))
        for number, name in tasks:
            found.append([number, name, _digest(plan.models[number], name, buffer)])

    def share() -> list[list[Any]]:
        run_on_threads(min(threads, len(own)), "holdfast-digest", own, work)
        return found

    digests: list[dict[str, str]] = [{} for _ in plan.models]
    for number, name, digest in sorted(entry for answer in run_on_all_ranks(ranks, share) for entry in answer):
        digests[number][name] = digest
    return digests


def _recorded(model: InputModel) -> Sequence[str]:
    if model.source.manifest.writer:
        return [names.MANIFEST]
    used = {place.file for source in model.tensors.values() for place in source.places()}
    return [file.name for file in model.stored if file.name in used]


def _digest(model: InputModel, name: str, buffer: memoryview) -> str:
    if name == names.MANIFEST:
        with model.lock:
            return digest_hex(model.source.storage.pin(model.source.folder).read(name, limits.JSON_BYTES))
    with model.lock:
        reader = model.source.open_file(name)
    try:
        digest = Digest()
        for at in range(0, reader.size, _PORTION_BYTES):
            part = buffer[: min(_PORTION_BYTES, reader.size - at)]
            reader.read_into(at, [part])
            digest.update(part)
        return digest.hexdigest()
    finally:
        reader.close()


def merge_record(options: MergeOptions, plan: MergePlan, digests: Sequence[Mapping[str, str]]) -> bytes:
    """Return the record as JSON. Equal merges of equal inputs have equal records."""
    models = [
        {
            "name": model.name,
            "path": model.options.path,
            "step": model.source.step,
            "parameters": _written(model.options.parameters),
            "mapping": None if model.options.mapping is None else str(model.options.mapping),
            "digests": dict(files),
        }
        for model, files in zip(plan.models, digests, strict=True)
    ]
    record = {
        "holdfast": __version__,
        "method": plan.method.name,
        "models": models,
        "base": None if plan.base is None else plan.models[plan.base].name,
        "donor": plan.models[plan.donor].name,
        "parameters": _written(options.parameters),
        "layers": [[plan.models[model].name, layer] for model, layer in plan.layers] or None,
        "dtype": options.dtype,
        "out_dtype": options.out_dtype,
        "tokens": None if plan.tokens is None else plan.tokens.table,
        "seed": options.seed,
        "rng": options.rng,
        "removed": {"patterns": list(options.remove), "keys": list(plan.removed.keys), "bytes": plan.removed.bytes},
        "tensors": len(plan.tensors),
        "bytes": sum(tensor.bytes for tensor in plan.tensors.values()),
    }
    return (json.dumps(record, indent=2) + "\n").encode()


def _written(settings: Settings) -> dict[str, Any]:
    return {name: setting.written() for name, setting in settings.items()}
