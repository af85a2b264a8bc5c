"""The public function `merge`: keyword arguments to options, ranks of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

from holdfast.adapters.comm import current_ranks
from holdfast.core.errors import InvalidArgument
from holdfast.core.names import step_folder
from holdfast.merging.merge import Merged, run_merge
from holdfast.merging.merge_file import MODEL_FIELDS, read_merge_file
from holdfast.merging.merge_options import MergeOptions, ModelOptions, settings_of

ModelLike = str | os.PathLike[str] | Mapping[str, Any]

_DEADLINE_S = 6 * 3600.0  # a finished rank waits for the others


def merge(
    models: Sequence[ModelLike] | str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    steps: Sequence[int] | None = None,
    method: str = "linear",
    base: ModelLike | None = None,
    weights: Sequence[Any] | None = None,
    densities: Sequence[Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    donor: str | None = None,
    dtype: str | None = None,
    out_dtype: str | None = None,
    remove: Sequence[str] = (),
    max_shard_size: int | str = "5GB",
    tokens: str | None = None,
    seed: int = 0,
    rng: str = "holdfast",
    verify: bool = True,
    force: bool = False,
) -> Merged:
    """Merge models into one folder that `from_pretrained` opens, a chunk at a time.

    `models` are folders that `holdfast.open` reads, or dicts with `path`, an optional `name` and `mapping`, and the
    parameters of the model; or the path of a YAML or TOML file that describes the merge (mergekit's is read as it is),
    and then it has the other options, but for `verify` and `force`; mergekit's has no `seed`, `rng`,
    `max_shard_size` and `tokens`, which may be given here. With `steps`, `models` is one run, whose steps are merged.
    `weights` and `densities` are one value for each model that is not the base; `parameters` are those of the method
    for all models. A value is a number, a list of numbers (a gradient from the first to the last layer), or a dict
    from key patterns to either. Side files such as config.json and the tokenizer come from `donor`: by default the
    base, or the first model. `remove` leaves out keys by patterns. `dtype` is the dtype to compute in, `out_dtype` the
    one to store. `tokens="union"` joins models with other tokens by token, `tokens="donor"` does so and keeps the
    donor's tokens only, `tokens="rows"` merges row by row. `seed` decides the random masks of dare and della; with
    `rng="mergekit"` they are mergekit's, in one process. `verify` checks the digests of the inputs, `force` replaces a
    checkpoint at the destination.

    Collective when torch.distributed is initialized: the ranks share the work, with the same bytes as one process.
    Raises Mismatch, with all problems, if keys or shapes of the models differ. The destination appears when it is
    complete, or not at all.
    """
    arguments = locals()
    if isinstance(models, str | os.PathLike):
        described = replace(read_merge_file(models, _beside_file(arguments)), verify=verify, force=force)
        return run_merge(described, destination, current_ranks(_DEADLINE_S))
    chosen = [model_options(model) for model in models]
    chosen = chosen if steps is None else steps_of_run(chosen, steps)
    given_base = None if base is None else model_options(base)
    for name, values in (("weight", weights), ("density", densities)):
        chosen = with_values(chosen, name, values)
    options = MergeOptions(
        models=tuple(chosen),
        method=method,
        base=given_base,
        parameters=settings_of(parameters),
        donor=donor,
        dtype=dtype,
        out_dtype=out_dtype,
        remove=tuple([remove] if isinstance(remove, str) else remove),
        max_shard_size=max_shard_size,
        tokens=tokens,
        seed=seed,
        rng=rng,
        verify=verify,
        force=force,
    )
    return run_merge(options, destination, current_ranks(_DEADLINE_S))


def _beside_file(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `merge` that a file may contradict: those that are not the defaults."""
    defaults = {name: parameter.default for name, parameter in signature(merge).parameters.items()}
    apart = ("models", "destination", "verify", "force")
    return {name: value for name, value in arguments.items() if name not in apart and value != defaults[name]}


def model_options(model: ModelLike) -> ModelOptions:
    """Return a model with its parameters from a path or a dict."""
    if not isinstance(model, Mapping):
        return ModelOptions(os.fspath(model))
    if not isinstance(model.get("path"), str | os.PathLike):
        raise InvalidArgument(
            f"a model needs a path; got the fields {', '.join(map(str, model)) or 'of an empty dict'}"
        )
    parameters = settings_of({name: value for name, value in model.items() if name not in MODEL_FIELDS})
    return ModelOptions(os.fspath(model["path"]), parameters, str(model.get("name", "")), model.get("mapping"))


def steps_of_run(models: Sequence[ModelOptions], steps: Sequence[int]) -> list[ModelOptions]:
    """Return steps of one run as models."""
    if len(models) != 1:
        raise InvalidArgument(f"steps are those of one run; got {len(models)} models")
    run = models[0]
    folders = [step_folder(step) for step in steps]
    return [
        replace(run, path=f"{run.path.rstrip('/')}/{folder}", name=run.name and f"{run.name}/{folder}")
        for folder in folders
    ]


def with_values(models: Sequence[ModelOptions], name: str, values: Sequence[Any] | None) -> list[ModelOptions]:
    """Return the models with one parameter set, one value for each; None leaves a model as it is."""
    if values is None:
        return list(models)
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != len(models):
        found = len(values) if isinstance(values, Sequence) else 1
        raise InvalidArgument(f"{name}: expected one value for each of the {len(models)} models, got {found}")
    return [
        replace(model, parameters={**model.parameters, **settings_of({name: value})})
        for model, value in zip(models, values, strict=True)
    ]
