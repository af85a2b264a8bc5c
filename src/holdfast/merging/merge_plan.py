"""The plan of a merge, from headers only: for every output tensor its inputs and parameters; all mismatches."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import InvalidArgument, Mismatch, NotFound
from holdfast.core.names import natural_key
from holdfast.format.dtypes import DType, dtype_named
from holdfast.merging.layers import LayerNames
from holdfast.merging.merge_options import MergeOptions, base_position
from holdfast.merging.methods import METHODS, method_named
from holdfast.merging.methods.base import MergeMethod, MethodParameter, TensorTask
from holdfast.merging.model_input import InputModel, TensorSource
from holdfast.merging.parameter_settings import Scalar, Settings

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
    """The tensors that `remove` leaves out, and their size in the model whose side files are copied."""

    keys: tuple[str, ...] = ()
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class MergePlan:
    """All output tensors by key, the method, and the models."""

    method: MergeMethod
    models: tuple[InputModel, ...]
    donor: int
    tensors: Mapping[str, MergedTensor]
    removed: RemovedKeys


def plan_merge(options: MergeOptions, models: Sequence[InputModel]) -> MergePlan:
    """Match the tensors of the models. Raises one Mismatch that lists all problems."""
    method = method_named(options.method)
    base = None if options.base is None else base_position(options.all_models, options.base)
    _check_models(method, models, base)
    _check_names(method, options)
    donor = _donor(options, models, base)
    removed = _removed(options.remove, models, donor)
    keys = [key for key in models[donor].tensors if key not in removed.keys]
    if not keys:
        raise NotFound("no tensor is left: the remove patterns match all of them")
    problems = _problems(keys, models, donor, set(removed.keys))
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise Mismatch("the models do not fit together:\n  " + "\n  ".join(problems[:_SHOWN]) + more)
    planner = _TensorPlanner(options, method, models, base, LayerNames.of(keys, models[donor].config))
    tensors = {key: planner.tensor(key) for key in sorted(keys, key=natural_key)}
    return MergePlan(method, tuple(models), donor, tensors, removed)


def _check_models(method: MergeMethod, models: Sequence[InputModel], base: int | None) -> None:
    if method.needs_base and base is None:
        raise InvalidArgument(f"{method.name} needs a base: the model that the others were trained from")
    if len(models) < method.least or (method.most is not None and len(models) > method.most):
        most = "" if method.most is None else f" and at most {method.most}"
        raise InvalidArgument(
            f"{method.name} merges at least {method.least}{most} models, base included; got {len(models)}"
        )


def _check_names(method: MergeMethod, options: MergeOptions) -> None:
    """Raise InvalidArgument for a parameter that the method does not have."""
    known = {parameter.name: parameter for parameter in method.parameters}
    scopes = [options.parameters, *(model.parameters for model in options.all_models)]
    for number, scope in enumerate(scopes):
        for name in scope:
            if name not in known:
                others = ", ".join(known) or "none"
                fits = [other.name for other in METHODS.values() if name in {p.name for p in other.parameters}]
                hint = f"; it is a parameter of {', '.join(fits)}" if fits else ""
                raise InvalidArgument(f"{method.name} has no parameter {name!r}; it has {others}{hint}")
            if number and not known[name].per_model:
                raise InvalidArgument(f"{name} is one value for the whole merge, not one for each model")


def _donor(options: MergeOptions, models: Sequence[InputModel], base: int | None) -> int:
    """Return the number of the model whose side files are copied: the named one, the base, or the first."""
    if options.donor is None:
        return 0 if base is None else base
    for number, model in enumerate(models):
        if options.donor in (model.name, model.options.path, model.path):
            return number
    known = ", ".join(model.name for model in models)
    raise InvalidArgument(f"donor {options.donor!r} is not a model of this merge; choose one of {known}")


def _removed(patterns: Sequence[str], models: Sequence[InputModel], donor: int) -> RemovedKeys:
    every = list(dict.fromkeys(key for model in models for key in model.tensors))
    matched = {pattern: fnmatch.filter(every, pattern) for pattern in patterns}
    for pattern, found in matched.items():
        if not found:
            near = ", ".join(every[:3])
            raise InvalidArgument(f"no key matches the remove pattern {pattern!r}; keys are, for example, {near}")
    keys = dict.fromkeys(key for found in matched.values() for key in found)
    sources = (models[donor].tensors.get(key) for key in keys)
    size = sum(math.prod(source.shape) * source.dtype.bytes for source in sources if source is not None)
    return RemovedKeys(tuple(sorted(keys, key=natural_key)), size)


def _problems(keys: Sequence[str], models: Sequence[InputModel], donor: int, removed: set[str]) -> list[str]:
    """Return a line for each key that is missing in a model, superfluous, or of another shape."""
    lines = []
    for number, model in enumerate(models):
        if number == donor:
            continue
        for key in keys:
            found, wanted = find_tied(model, key), models[donor].tensors[key]
            if found is None:
                lines.append(f"{model.path} has no {key!r}, which {models[donor].path} has; --remove it, or map names")
            elif found.shape != wanted.shape:
                shapes = f"{list(found.shape)}, in {models[donor].path} {list(wanted.shape)}"
                lines.append(f"{key!r} of {model.path} has the shape {shapes}{_vocabulary_hint(found, wanted)}")
            elif (found.dtype.name in _FLOATS) != (wanted.dtype.name in _FLOATS):
                lines.append(f"{key!r} is {found.dtype.name} in {model.path}, and {wanted.dtype.name} in the donor")
        for key in model.tensors.keys() - set(keys) - removed:
            lines.append(
                f"{model.path} has {key!r}, which {models[donor].path} has not; --remove it, or name another --donor"
            )
    return lines


def _vocabulary_hint(found: TensorSource, wanted: TensorSource) -> str:
    if len(found.shape) != 2 or found.shape[1:] != wanted.shape[1:]:
        return ""
    return "; if these are vocabularies of different sizes, they cannot be added row by row"


def find_tied(model: InputModel, key: str) -> TensorSource | None:
    """Return the tensor of a key; for an output embedding that a model's config ties, its input embedding."""
    found = model.find(key)
    if found is not None or not model.is_tied:
        return found
    layer = key.rpartition(".")[0].rpartition(".")[2]
    if layer not in ("lm_head", "output", "embed_out"):
        return None
    inputs = [name for name in model.tensors if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    return model.tensors[inputs[0]] if len(inputs) == 1 else None


class _TensorPlanner:
    """Plans one output tensor at a time."""

    def __init__(
        self,
        options: MergeOptions,
        method: MergeMethod,
        models: Sequence[InputModel],
        base: int | None,
        layers: LayerNames,
    ) -> None:
        self._options = options
        self._method = method
        self._models = models
        self._base = base
        self._layers = layers

    def tensor(self, key: str) -> MergedTensor:
        inputs = []
        for number, model in enumerate(self._models):
            source = find_tied(model, key)
            assert source is not None
            inputs.append(TensorInput(number, key, source))
        shape = inputs[0].source.shape
        dtypes = [source.source.dtype for source in inputs]
        if dtypes[0].name not in _FLOATS:
            return MergedTensor(key, shape, dtypes[0], tuple(inputs), None)
        task = self._task(key, inputs, _compute_dtype(dtypes, self._options.dtype))
        self._method.check(task)
        out = self._options.out_dtype or str(task.dtype).removeprefix("torch.")
        return MergedTensor(key, shape, dtype_named(out), tuple(inputs), task)

    def _task(self, key: str, inputs: Sequence[TensorInput], dtype: torch.dtype) -> TensorTask:
        depth = self._layers.depth(key)
        shared, per_input = {}, []
        for parameter in self._method.parameters:
            if not parameter.per_model:
                shared[parameter.name] = self._value(parameter, key, depth, [self._options.parameters])
        for number, source in enumerate(inputs):
            own = [self._models[source.model].options.parameters, self._options.parameters]
            per_input.append(
                {
                    parameter.name: self._value(parameter, key, depth, own, self._models[source.model].path)
                    for parameter in self._method.parameters
                    if parameter.per_model and (parameter.base_too or number != self._base)
                }
            )
        return TensorTask(
            key=key,
            shape=inputs[0].source.shape,
            elements=math.prod(inputs[0].source.shape),
            dtype=dtype,
            names=tuple(self._models[source.model].name for source in inputs),
            base=self._base,
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
            where = f" of {model}" if model else ""
            raise InvalidArgument(f"{self._method.name} needs {parameter.name}, the {parameter.about}{where}: {key!r}")
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
