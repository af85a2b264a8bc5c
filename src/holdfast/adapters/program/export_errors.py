"""Errors of an export: what a program cannot have, by name, with the way out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch

from holdfast.core.errors import HoldfastError, InvalidArgument, Unsupported

_PLAIN = (tuple, list, dict)
_CACHE = (
    "Export the model without one (model.config.use_cache = False, no past_key_values), or wrap it in a module whose "
    "forward takes and returns the keys and values as plain tensors"
)
_UNKNOWN_OUTPUT = re.compile(r"Found <class '([^']+)'> in output")
_EXPERTS = (
    "set model.set_experts_implementation('batched_mm') (config._experts_implementation='batched_mm' in older versions "
    "of transformers) before the export: the experts are then computed by operators of torch"
)


def check_inputs(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise Unsupported for inputs that are not tensors, numbers, texts, tuples, lists and dicts, such as a cache."""
    try:
        given: Mapping[str, Any] = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError as error:
        raise InvalidArgument(f"example_inputs do not fit the forward of {type(model).__name__}: {error}") from error
    for name, value in given.items():
        _check_input(name, value)


def _check_input(name: str, value: Any) -> None:
    if value is None or isinstance(
        value, torch.Tensor | bool | int | float | complex | str | torch.dtype | torch.device
    ):
        return
    kind = type(value)
    if kind in _PLAIN:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            if isinstance(value, dict) and not isinstance(key, str):
                raise Unsupported(f"{name} is a dict with the key {key!r}: keys of inputs are texts")
            _check_input(f"{name}[{key!r}]", part)
        return
    if "Cache" in kind.__name__:
        raise Unsupported(f"{name} is a {kind.__name__}: a program has no key-value cache as an input. {_CACHE}")
    raise Unsupported(
        f"{name} is a {kind.__module__}.{kind.__qualname__}: inputs of a program are tensors, numbers, texts and None "
        "in tuples, lists and dicts; wrap the model in a module whose forward takes its tensors"
    )


def operator_problem(name: str, where: str) -> HoldfastError:
    """Return the error for an operator outside of the table; `where` is the module that calls it."""
    place = f" (called in {where})" if where else ""
    if "grouped_mm" in name:
        return Unsupported(f"{name}{place} is not an operator of aten that a program may call: {_EXPERTS}")
    if name.startswith("aten."):
        return Unsupported(
            f"{name}{place} is outside of the operators that a program may call; compute it by other operators, or "
            "export with decompose=True, which may replace it"
        )
    return Unsupported(
        f"{name}{place} is a custom operator, and a program may call only those of aten: replace it for the export, "
        "for example by the model's own implementation in plain torch"
    )


def export_problem(error: Exception, model: torch.nn.Module) -> HoldfastError:
    """Return the error for an export that torch refused, with advice where it is known."""
    text, kind = str(error), type(error).__name__
    first = text.strip().splitlines()[0][:400] if text.strip() else kind
    name = type(model).__name__
    if output := _UNKNOWN_OUTPUT.search(text):
        way = _CACHE if "Cache" in output[1] else "Wrap the model in a module whose forward returns its tensors"
        return Unsupported(f"{name} returns a {output[1]}, which a program cannot have among its outputs. {way}")
    if "DataDependent" in kind or "data-dependent" in text.lower() or "unbacked symint" in text.lower():
        return Unsupported(
            f"{name} decides by the values of its tensors (a loop or a branch), which no graph can hold: {first}. For "
            f"a mixture of experts of transformers, {_EXPERTS}; in a model of your own, compute every branch and "
            "choose with torch.where"
        )
    if isinstance(error, torch._dynamo.exc.UserError) or "Constraint" in kind:
        return InvalidArgument(f"{name} cannot be exported with these inputs and dynamic_shapes: {text.strip()[:2000]}")
    return Unsupported(f"{name} cannot be exported: torch.export raised {kind}: {first}")


def decomposition_problem(error: Exception, model: torch.nn.Module) -> HoldfastError:
    """Return the error for a graph that torch exported and cannot decompose."""
    first = (str(error).strip().splitlines() or [""])[0][:400]
    way = "Export it without decompose=True"
    if "Cannot view a tensor" in first:
        way += (
            ", with reshape in place of view in its code, or with another attention "
            "(model.set_attn_implementation('eager') in transformers): torch does not know the strides of fused "
            "attention when it decomposes"
        )
    name = type(model).__name__
    return Unsupported(f"torch cannot decompose the program of {name}: {type(error).__name__}: {first}. {way}")
