"""The plan of a merge, from headers only: for every output tensor its inputs and parameters; all mismatches."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.core.names import natural_key
from holdfast.format.dtypes import DType, dtype_named
from holdfast.merging.joined_tokens import JoinedTokens, join_tokens
from holdfast.merging.merge_options import MergeOptions, base_position
from holdfast.merging.methods import METHODS, method_named
from holdfast.merging.methods.base import MergeMethod, MethodParameter, TensorTask
from holdfast.merging.model_input import InputModel, TensorSource, find_tied
from holdfast.merging.output_keys import OutputKey, SlicedKeys, whole_keys
from holdfast.merging.parameter_settings import Scalar, Setting, Settings
from holdfast.merging.token_ids import TokenIds, conflict, read_token_ids

_SHOWN = 5
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class TensorInput:
    """An input of an output tensor: the number of its model, its key there, and the tensor."""

    model: int
    key: str
    source: TensorSource


@dataclass(frozen=True, slots=True)
class MergedTensor:
    """An output tensor. One without a task is no floating-point tensor: it is copied, and equal in all inputs."""

    key: str
    shape: tuple[int, ...]
    dtype: DType
    inputs: tuple[TensorInput, ...]
    task: TensorTask | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class RemovedKeys:
    """The tensors that `remove` leaves out, and their size in the first model that they would be merged from."""

    keys: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All output tensors by key, the method, and the models."""

    method: MergeMethod
    models: tuple[InputModel, ...]
    base: int | None
    donor: int
    tensors: Mapping[str, MergedTensor]
    removed: RemovedKeys
    layers: tuple[tuple[int, int], ...]  # of slices: for each layer of the output a model and its layer
    tokens: JoinedTokens | None = None


def plan_merge(options: MergeOptions, models: Sequence[InputModel]) -> MergePlan:
    """Match the tensors of the models. Raises one Mismatch that lists all problems."""
    method = method_named(options.method)
    base = None if options.base is None else base_position(options.all_models, options.base)
    _check_names(method, options)
    _check_base(method, options)
    donor = _donor(options, models, base)
    known = _known_tokens(options, models)
    joined = None if known is None else join_tokens(models, known, donor, base, append=options.tokens == "union")
    outputs, origins = _outputs(options, models, donor)
    for count, has_base in {(len(out.inputs), base in [i.model for i in out.inputs]) for out in outputs}:
        _check_models(method, count, has_base=has_base)
    _check_patterns(outputs)
    outputs, removed = _without_removed(outputs, options.remove, models, donor)
    problems = _problems(outputs, models)
    if not options.slices:
        problems += _superfluous(outputs, models, donor, options.remove)
    if joined is None and options.tokens != "rows":
        problems += _token_problems(models, donor)
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise Mismatch("the models do not fit together:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
    planner = _TensorPlanner(options, method, models, base)
    tensors = {out.key: planner.tensor(out) for out in sorted(outputs, key=lambda out: natural_key(out.key))}
    return MergePlan(method, tuple(models), base, donor, tensors, removed, tuple(origins), joined)


def _outputs(
    options: MergeOptions, models: Sequence[InputModel], donor: int
) -> tuple[list[OutputKey], list[tuple[int, int]]]:
    """Return the keys of the output, and where its layers come from if they come from slices."""
    if not options.slices:
        return whole_keys(options, models, list(models[donor].tensors), donor), []
    sliced = SlicedKeys(options, models, donor)
    return sliced.keys(), sliced.origins()


def _check_models(method: MergeMethod, count: int, *, has_base: bool) -> None:
    if method.needs_base and not has_base:
        raise InvalidArgument(f"{method.name} needs a base: the model that the others were trained from")
    if count < method.least or (method.most is not None and count > method.most):
        most = "" if method.most is None else f" and at most {method.most}"
        raise InvalidArgument(f"{method.name} merges at least {method.least}{most} models, base included; got {count}")


def _check_names(method: MergeMethod, options: MergeOptions) -> None:
    """Raise InvalidArgument for a parameter that the method does not have."""
    known = {parameter.name: parameter for parameter in method.parameters}
    scopes = [options.parameters, *(model.parameters for model in options.all_models)]
    scopes += [source.parameters for part in options.slices for source in part.sources]
    for number, scope in enumerate(scopes):
        for name in scope:
            if name not in known:
                others = ", ".join(known) or "none"
                fits = [other.name for other in METHODS.values() if name in {p.name for p in other.parameters}]
                hint = f"; it is a parameter of {', '.join(fits)}" if fits else ""
                raise InvalidArgument(f"{method.name} has no parameter {name!r}; it has {others}{hint}")
            if number and not known[name].per_model:
                raise InvalidArgument(f"{name} is one value for the whole merge, not one for each model")


def _check_base(method: MergeMethod, options: MergeOptions) -> None:
    """Raise InvalidArgument for a base that the method would merge like the other models, which it does not name."""
    base = options.base
    if base is None or method.needs_base or options.slices or base_position(options.models, base) is not None:
        return
    raise InvalidArgument(
        f"{method.name} has no base, and {base.path} is not among the models: name it there to merge it too, "
        "or choose a method with a base"
    )


def _check_patterns(outputs: Sequence[OutputKey]) -> None:
    """Raise InvalidArgument for a key pattern of a parameter that matches no key."""
    keys: dict[tuple[str, Setting], set[str]] = {}
    for out in outputs:
        scopes = [(out.key, scope) for scope in out.settings]
        scopes += [(member.key, scope) for member in out.inputs for scope in member.settings]
        for key, scope in scopes:
            for parameter in scope.items():
                keys.setdefault(parameter, set()).add(key)
    for (name, setting), found in keys.items():
        setting.check(found, name)


def _donor(options: MergeOptions, models: Sequence[InputModel], base: int | None) -> int:
    """Return the number of the model whose side files are copied: the named one, the base, or the first."""
    if options.donor is None:
        return 0 if base is None else base
    for number, model in enumerate(models):
        if options.donor in (model.name, model.options.path, model.path):
            return number
    known = ", ".join(model.name for model in models)
    raise InvalidArgument(f"donor {options.donor!r} is not a model of this merge; choose one of {known}")


def _without_removed(
    outputs: Sequence[OutputKey], patterns: Sequence[str], models: Sequence[InputModel], donor: int
) -> tuple[list[OutputKey], RemovedKeys]:
    """Return the keys that no remove pattern matches, and the removed ones with the size of their first input."""
    every = dict.fromkeys([*(out.key for out in outputs), *(key for model in models for key in model.tensors)])
    for pattern in patterns:
        if not fnmatch.filter(every, pattern):
            near = ", ".join(list(every)[:3])
            raise InvalidArgument(f"no key matches the remove pattern {pattern!r}; keys are, for example, {near}")
    kept, removed, size = [], [], 0
    for out in outputs:
        if not _matches(out.key, patterns):
            kept.append(out)
            continue
        source = find_tied(models[out.inputs[0].model], out.inputs[0].key)
        removed.append(out.key)
        size += 0 if source is None else math.prod(source.shape) * source.dtype.bytes
    if not kept:
        raise NotFound("no tensor is left: the remove patterns match all of them")
    return kept, RemovedKeys(tuple(sorted(removed, key=natural_key)), size)


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _problems(outputs: Sequence[OutputKey], models: Sequence[InputModel]) -> list[str]:
    """Return a line for each input that is missing, of another shape, or no floating-point tensor like the others."""
    lines = []
    for out in outputs:
        found = [
            (models[member.model], member.key, find_tied(models[member.model], member.key)) for member in out.inputs
        ]
        first = next(((model, source) for model, _, source in found if source is not None), None)
        if first is None:
            continue
        wanted_in, wanted = first
        for model, key, source in found:
            if source is None:
                lines.append(f"{model.path} has no {key!r}, which {wanted_in.path} has; --remove it, or map names")
            elif source.shape != wanted.shape:
                shapes = f"{list(source.shape)}, in {wanted_in.path} {list(wanted.shape)}"
                lines.append(f"{key!r} of {model.path} has the shape {shapes}{_vocabulary_hint(source, wanted)}")
            elif (source.dtype.name in _FLOATS) != (wanted.dtype.name in _FLOATS):
                lines.append(
                    f"{key!r} is {source.dtype.name} in {model.path}, and {wanted.dtype.name} in {wanted_in.path}"
                )
    return lines


def _superfluous(
    outputs: Sequence[OutputKey], models: Sequence[InputModel], donor: int, patterns: Sequence[str]
) -> list[str]:
    """Return a line for each key of a model that the output has not."""
    keys = {out.key for out in outputs}
    return [
        f"{model.path} has {key!r}, which {models[donor].path} has not; --remove it, or name another --donor"
        for number, model in enumerate(models)
        for key in model.tensors
        if number != donor and key not in keys and not _matches(key, patterns)
    ]


def _vocabulary_hint(found: TensorSource, wanted: TensorSource) -> str:
    if len(found.shape) != 2 or found.shape[1:] != wanted.shape[1:]:
        return ""
    return "; if these are vocabularies of different sizes, join them with tokens='union' (--tokens union)"


def _known_tokens(options: MergeOptions, models: Sequence[InputModel]) -> list[TokenIds] | None:
    """Return the tokens of the models to join; None if they are not to be joined.

    With tokens="donor" models whose tokens are not known must not differ in them; with "union" they raise Unsupported.
    """
    if options.tokens not in ("union", "donor"):
        return None
    found = [read_token_ids(model) for model in models]
    known = [tokens for tokens in found if tokens is not None]
    if len(known) == len(models):
        return known
    if options.tokens == "donor":
        return None
    without = next(model for model, tokens in zip(models, found, strict=True) if tokens is None)
    raise Unsupported(
        f"{without.path}: tokens can only be joined with a tokenizer.json; tokens='rows' merges row by row"
    )


def _token_problems(models: Sequence[InputModel], donor: int) -> list[str]:
    """Return a line for each model whose rows stand for other tokens than those of the donor."""
    found = (conflict(model, models[donor]) for number, model in enumerate(models) if number != donor)
    return [line for line in found if line is not None]


class _TensorPlanner:
    """Plans one output tensor at a time."""

    def __init__(
        self, options: MergeOptions, method: MergeMethod, models: Sequence[InputModel], base: int | None
    ) -> None:
        self._options = options
        self._method = method
        self._models = models
        self._base = base

    def tensor(self, out: OutputKey) -> MergedTensor:
        inputs = []
        for member in out.inputs:
            source = find_tied(self._models[member.model], member.key)
            assert source is not None
            inputs.append(TensorInput(member.model, member.key, source))
        shape = inputs[0].source.shape
        dtypes = [source.source.dtype for source in inputs]
        if dtypes[0].name not in _FLOATS:
            return MergedTensor(out.key, shape, dtypes[0], tuple(inputs), None)
        task = self._task(out, inputs, _compute_dtype(dtypes, self._options.dtype))
        self._method.check(task)
        dtype = self._options.out_dtype or str(task.dtype).removeprefix("torch.")
        return MergedTensor(out.key, shape, dtype_named(dtype), tuple(inputs), task)

    def _task(self, out: OutputKey, inputs: Sequence[TensorInput], dtype: torch.dtype) -> TensorTask:
        base = next((number for number, member in enumerate(out.inputs) if member.model == self._base), None)
        shared, per_input = {}, []
        for parameter in self._method.parameters:
            if not parameter.per_model:
                shared[parameter.name] = self._value(parameter, out.key, out.depth, out.settings)
        for number, member in enumerate(out.inputs):
            path = self._models[member.model].path
            per_input.append(
                {
                    parameter.name: self._value(parameter, member.key, out.depth, member.settings, path)
                    for parameter in self._method.parameters
                    if parameter.per_model and (parameter.base_too or number != base)
                }
            )
        return TensorTask(
            key=out.key,
            shape=inputs[0].source.shape,
            elements=math.prod(inputs[0].source.shape),
            dtype=dtype,
            names=tuple(self._models[member.model].name for member in out.inputs),
            base=base,
            shared=shared,
            per_input=tuple(per_input),
        )

    def _value(
        self, parameter: MethodParameter, key: str, depth: float, scopes: Sequence[Settings], model: str = ""
    ) -> Scalar:
        for scope in scopes:
            value: Any = scope[parameter.name].at(key, depth) if parameter.name in scope else None
            if value is not None:
                return bool(value) if isinstance(parameter.default, bool) else value
        if parameter.default is None:
            where = f" for {model}" if model else ""
            flag = f"--{parameter.name}" if parameter.name in ("weight", "density") else f"--set {parameter.name}=VALUE"
            raise InvalidArgument(
                f"{self._method.name} needs {parameter.name}, the {parameter.about}, and none is given{where} (the "
                f"first tensor is {key}): give it with {flag}, or in a file"
            )
        return parameter.default


def _compute_dtype(dtypes: Sequence[DType], given: str | None) -> torch.dtype:
    """Return the dtype that all inputs are cast to: the given one, or the one that torch promotes them to."""
    if given is not None:
        return _torch_dtype(given)
    found = _torch_dtype(dtypes[0].name)
    for dtype in dtypes[1:]:
        found = torch.promote_types(found, _torch_dtype(dtype.name))
    return found


def _torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
