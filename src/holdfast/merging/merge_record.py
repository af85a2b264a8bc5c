"""The record of a merge: the inputs with their digests, the method with its parameters, and what was removed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.merging.merge_options import MergeOptions
from holdfast.merging.merge_plan import MergePlan
from holdfast.merging.parameter_settings import Settings
from holdfast.version import __version__

_SHOWN = 5


def merge_record(
    options: MergeOptions, plan: MergePlan, digests: Sequence[Mapping[str, str]], not_finite: Mapping[str, int]
) -> bytes:
    """Return the record as JSON. Equal merges of equal inputs have equal records.

    `not_finite` has the number of NaN and infinite elements of each output tensor that has any.
    """
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
        "not_finite": dict(sorted(not_finite.items())),
        "tensors": len(plan.tensors),
        "bytes": sum(tensor.bytes for tensor in plan.tensors.values()),
    }
    return (json.dumps(record, indent=2) + "\n").encode()


def not_finite_note(counts: Mapping[str, int]) -> str:
    """Return a note about the output tensors that have NaN or infinite elements, by key with their number."""
    keys = [f"{key} ({count:,})" for key, count in sorted(counts.items())]
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return f"elements are NaN or infinite in {', '.join(keys[:_SHOWN])}{more}"


def _written(settings: Settings) -> dict[str, Any]:
    return {name: setting.written() for name, setting in settings.items()}
