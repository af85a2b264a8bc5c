"""The hub's names for a torchtitan model, as a mapping: what its state dict adapter does, in Holdfast's statements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.integrations.torchtitan.traced_weight import Operation, Permute, Reshape, Slice, TracedWeight


def hub_statements(shapes: Mapping[str, Sequence[int]], parts: Sequence[Any], adapter: Any) -> list[str]:
    """Return the statements that turn a model's parameters into the weights of the hub.

    `shapes` has every parameter of the whole model. The state dict hooks of `parts` (which split fused weights) and
    the adapter run over traced weights. Raises Unsupported, naming the key, for what a mapping cannot express.
    """
    traced: dict[str, Any] = {key: TracedWeight(key, tuple(shape)) for key, shape in shapes.items()}
    for part in parts:
        _run_hooks(part, traced)
    try:
        weights = adapter.to_hf(traced)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise Unsupported(f"{type(adapter).__name__} cannot be traced: {type(error).__name__}: {error}") from error
    foreign = [name for name, weight in weights.items() if not isinstance(weight, TracedWeight)]
    if foreign:
        raise Unsupported(f"{type(adapter).__name__} computes {foreign[0]!r}, which a mapping cannot express")
    return _Statements(shapes).of(weights)


def _run_hooks(part: Any, traced: dict[str, Any]) -> None:
    """Run the hooks with which the modules of a model change their state dict, as `state_dict()` does."""
    for name, module in part.named_modules():
        prefix = f"{name}." if name else ""
        for hook in module._state_dict_hooks.values():
            hook(module, traced, prefix, {})


class _Statements:
    """Write the operations of traced weights as statements; weights with common operations share their names."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        self._parameters = shapes
        self._lines: list[str] = []
        self._children: dict[tuple[str, tuple[Operation, ...]], set[Operation]] = {}
        self._names: dict[tuple[str, tuple[Operation, ...]], str] = {}

    def of(self, weights: Mapping[str, TracedWeight]) -> list[str]:
        for name, weight in weights.items():
            known = self._names.setdefault((weight.key, weight.operations), name)
            if known != name:
                raise Unsupported(f"{name!r} and {known!r} are the same weight {weight.key!r}: a mapping keeps one")
            for at, operation in enumerate(weight.operations):
                self._children.setdefault((weight.key, weight.operations[:at]), set()).add(operation)
        for weight in weights.values():
            self._write(weight.key, weight.operations)
        return self._lines

    def _write(self, key: str, operations: tuple[Operation, ...]) -> None:
        """Write the statements that lead to a weight, once each."""
        if not operations:
            if self._names[key, ()] != key:
                self._lines.append(f"{_quoted(key)} -> {_quoted(self._names[key, ()])}")
            return
        for at in range(len(operations)):
            before = operations[:at]
            steps = self._children.pop((key, before), None)
            if steps is not None:
                self._lines.extend(self._step(key, before, steps))

    def _step(self, key: str, before: tuple[Operation, ...], steps: set[Operation]) -> Iterator[str]:
        source = _quoted(self._name(key, before))
        slices = sorted((step for step in steps if isinstance(step, Slice)), key=lambda step: step.start)
        if slices:
            if len(slices) != len(steps) or len({step.dim for step in slices}) > 1:
                raise Unsupported(f"{key}: an adapter uses it whole and in slices, which a mapping cannot express")
            targets = ", ".join(_quoted(self._name(key, (*before, step))) for step in slices)
            sizes = [step.stop - step.start for step in slices]
            yield f"{source} -> {targets}, axis={slices[0].dim}, sizes={sizes}"
            return
        if len(steps) > 1:
            raise Unsupported(f"{key}: an adapter reshapes it in {len(steps)} ways, which a mapping cannot express")
        (step,) = steps
        target = _quoted(self._name(key, (*before, step)))
        if isinstance(step, Permute):
            yield f"{source} -> {target}, permute='{list(step.dims)}'"
        elif isinstance(step, Reshape):
            shape = _shape(self._parameters[key], before)
            yield f"{source} -> {target}, reshape={list(step.shape)}, src_shape={list(shape)}"

    def _name(self, key: str, operations: tuple[Operation, ...]) -> str:
        """Return the hub's name of a weight, the model's of a parameter, or a temporary one."""
        if not operations:
            return key
        at = (key, operations)
        return self._names.setdefault(at, f"{key}:{len(self._names)}")


def _shape(parameter: Sequence[int], operations: tuple[Operation, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter after some operations."""
    shape = tuple(parameter)
    for operation in operations:
        if isinstance(operation, Reshape):
            shape = operation.shape
        elif isinstance(operation, Permute):
            shape = tuple(shape[dim] for dim in operation.dims)
        else:
            shape = (*shape[: operation.dim], operation.stop - operation.start, *shape[operation.dim + 1 :])
    return shape


def _quoted(name: str) -> str:
    return f'"{name}"'
