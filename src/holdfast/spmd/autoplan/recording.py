"""A recording of a model's forward pass on meta tensors: every operator, its flops, modules and parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from holdfast.spmd.autoplan.nested_tensors import map_tensors, tensors_in
from holdfast.spmd.autoplan.op_flows import OpCall, OpFlow, Shape, flows_of
from holdfast.spmd.autoplan.units import Unit, UnitWay, is_unit
from holdfast.spmd.base.spmd_errors import SpmdArgumentError, UnsupportedCall

# Recorded whole: their decompositions have fewer flows.
COMPOSITES: dict[Callable[..., Any], str] = {
    functional.linear: "linear",
    functional.scaled_dot_product_attention: "scaled_dot_product_attention",
    functional.rms_norm: "rms_norm",
    functional.layer_norm: "layer_norm",
    functional.group_norm: "group_norm",
}
# Their gradients are linear in the incoming gradient and need nothing else, so partial sums pass.
PASSING = frozenset({"add", "sub", "neg", "view", "_unsafe_view", "reshape", "squeeze", "unsqueeze", "transpose", "t"})
PASSING |= {"permute", "_to_copy", "clone", "alias", "sum", "stack", "expand", "slice", "select", "unbind", "cat"}
VIEWS = frozenset({"view", "squeeze", "unsqueeze", "transpose", "t", "permute", "slice", "select", "unbind", "expand"})
Inputs = Sequence[Any] | Mapping[str, Any] | torch.Tensor
VIEWS |= {"split", "split_with_sizes", "alias", "detach", "_unsafe_view"}


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor; a parameter if it has a key."""

    shape: Shape
    bytes: int
    has_gradient: bool
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One call: the values by number, and the innermost module that made it."""

    name: str
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    flows: tuple[OpFlow, ...]
    flops: int
    ways: tuple[UnitWay, ...] = ()  # of a unit, instead of flows
    weights: int = 0  # the number of a unit's inputs that are its parameters


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module's first input tensor, and its first result."""

    first: int | None
    result: int | None


@dataclass(slots=True)
class Recording:
    """All of one forward pass, in order."""

    values: list[Value] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    calls: dict[str, ModuleCall] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()

    def under(self, module: str) -> list[Step]:
        """Return the steps of a module and its children."""
        return [step for step in self.steps if is_under(step.module, module)]


def is_under(name: str, module: str) -> bool:
    """Return True if a module is `module` or inside of it."""
    return not module or name == module or name.startswith(f"{module}.")


def record(model: nn.Module, example_inputs: Inputs) -> Recording:
    """Run `model` on the meta device and record what it does; the model is not changed.

    Raises UnsupportedCall if the forward needs values, which meta tensors lack.
    """
    recorder = _ForwardRecorder()
    state = _without_contents(model, recorder)
    args, kwargs = (_meta(value) for value in arguments_of(example_inputs))
    with ExitStack() as stack:
        stack.enter_context(_hooked(model, recorder))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_Functions(recorder))
        stack.enter_context(_Operators(recorder))
        try:
            out = torch.func.functional_call(model, state, args, kwargs, tie_weights=False)
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedCall(
                f"the model cannot be planned: without contents {recorder.module or 'it'} raised "
                f"{type(error).__name__}: {error}. A module that reads values has to be a unit: give it "
                "placement_ways, rehearse and flops"
            ) from error
    recorder.recording.outputs = tuple(recorder.number(tensor) for tensor in tensors_in(out))
    return recorder.recording


def arguments_of(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for the model: a dict names its inputs, a tensor is the only one."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return ((example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)), {}


def _without_contents(model: nn.Module, recorder: _ForwardRecorder) -> dict[str, torch.Tensor]:
    """Return meta parameters and buffers by name; a tensor with several names has one meta tensor.

    Each module is visited once: torch would restore the meta tensors of a module with several names.
    """
    made: dict[int, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for key, tensor in own_tensors(module):
            full = f"{name}.{key}" if name else key
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                recorder.note(
                    made[id(tensor)], full if isinstance(tensor, nn.Parameter) else None, tensor.requires_grad
                )
            state[full] = made[id(tensor)]
    return state


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's own parameters and buffers, each under all of its names."""
    parameters = module.named_parameters(recurse=False, remove_duplicate=False)
    return [*parameters, *module.named_buffers(recurse=False, remove_duplicate=False)]


def _meta(value: Any) -> Any:
    """Return the same structure with meta tensors."""
    return map_tensors(value, lambda tensor: torch.empty_like(tensor, device="meta"))


class _ForwardRecorder:
    """Writes a recording: knows the tensors by number and the active modules."""

    def __init__(self) -> None:
        self.recording = Recording()
        self.stack: list[str] = []
        self.is_paused = False
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._strays: dict[int, torch.Tensor] = {}

    @property
    def module(self) -> str:
        return self.stack[-1] if self.stack else ""

    def note(self, tensor: torch.Tensor, key: str | None = None, has_gradient: bool = False) -> int:
        """Number a tensor that is new, or has new contents."""
        shape = tuple(tensor.shape)
        self._alive.append(tensor)
        self._numbers[id(tensor)] = len(self.recording.values)
        self.recording.values.append(Value(shape, math.prod(shape) * tensor.itemsize, has_gradient, key))
        return len(self.recording.values) - 1

    def number(self, tensor: torch.Tensor) -> int:
        known = self._numbers.get(id(tensor))
        return self.note(tensor) if known is None else known

    def without_contents(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the meta tensor for a tensor that a model has outside of its buffers."""
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._strays:
            self._alive.append(tensor)
            self._strays[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return self._strays[id(tensor)]

    def step(
        self, name: str, tags: Sequence[Any], args: tuple[Any, ...], tensors: list[torch.Tensor], out: Any
    ) -> None:
        inputs = tuple(self.number(tensor) for tensor in tensors)
        results = tensors_in(out)
        has_gradient = any(self.recording.values[number].has_gradient for number in inputs)
        outputs = tuple(self.note(tensor, None, has_gradient and tensor.is_floating_point()) for tensor in results)
        op_call = OpCall(
            args, *(tuple(self.recording.values[n].shape for n in numbers) for numbers in (inputs, outputs))
        )
        flows = flows_of(name, tags, op_call)
        self.recording.steps.append(Step(name, self.module, inputs, outputs, flows, _flops(name, op_call)))

    def unit(self, module: Unit, args: tuple[Any, ...]) -> Any:
        """Record a unit as one step, without looking inside."""
        self.is_paused = True
        out, declared, flops = module.rehearse(*args), module.placement_ways(*args), module.flops(*args)
        self.is_paused = False
        assert isinstance(module, nn.Module)
        weights = [self.number(parameter) for _, parameter in module.named_parameters()]
        input_numbers = [self.number(tensor) for tensor in tensors_in(args)]
        outputs = tuple(self.note(tensor, None, True) for tensor in tensors_in(out))
        names = [key for key, _ in module.named_parameters()]
        ways = []
        for way in declared:
            if set(way.parameters) != set(names) or len(way.inputs) != len(input_numbers):
                raise SpmdArgumentError(f"{self.module}: a UnitWay has to name every parameter and input, got {way}")
            ways.append(replace(way, parameters={name: way.parameters[name] for name in names}))
        self.recording.steps.append(
            Step("unit", self.module, (*weights, *input_numbers), outputs, (), flops, tuple(ways), len(weights))
        )
        return out


def _flops(name: str, op_call: OpCall) -> int:
    """Return the operations of forward and backward: a product's gradients cost twice the product."""
    if name in ("mm", "addmm", "bmm", "linear"):
        inner = op_call.inputs[0][-1] if name != "addmm" else op_call.inputs[1][-1]
        return 6 * math.prod(op_call.outputs[0]) * inner
    if name == "convolution":
        return 6 * math.prod(op_call.outputs[0]) * math.prod(op_call.inputs[1][1:])
    if name == "scaled_dot_product_attention":
        return 12 * math.prod(op_call.inputs[0]) * op_call.inputs[1][-2]
    return 0


class _Functions(TorchFunctionMode):
    """Records composite functions as one step."""

    def __init__(self, recorder: _ForwardRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = map_tensors((tuple(args), kwargs or {}), self._recorder.without_contents)
        name = COMPOSITES.get(func)
        if name is None or self._recorder.is_paused:
            return func(*args, **kwargs)
        self._recorder.is_paused = True
        try:
            out = func(*args, **kwargs)
        finally:
            self._recorder.is_paused = False
        self._recorder.step(name, (), args, tensors_in((*args, *kwargs.values())), out)
        return out


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator outside of composites."""

    def __init__(self, recorder: _ForwardRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._recorder.is_paused:
            tensors = tensors_in((*args, *(kwargs or {}).values()))
            self._recorder.step(func._schema.name.split("::")[1], func.tags, args, tensors, out)
        return out


@contextmanager
def _hooked(model: nn.Module, recorder: _ForwardRecorder) -> Iterator[None]:
    """Register hooks that tell the recorder which module is active; units are rehearsed instead of run."""
    with ExitStack() as stack:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(_entering(recorder, name), prepend=True)
            after = module.register_forward_hook(_leaving(recorder, name), with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
            if is_unit(module):
                stack.enter_context(_rehearsed(module, recorder))
        yield


def _entering(recorder: _ForwardRecorder, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        recorder.stack.append(name)

    return hook


def _leaving(recorder: _ForwardRecorder, name: str) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        first, result = tensors_in((args, kwargs))[:1], tensors_in(out)[:1]
        numbers = [recorder.number(tensor) for tensor in (*first, *result)]
        call = ModuleCall(numbers[0] if first else None, numbers[-1] if result else None)
        recorder.recording.calls.setdefault(name, call)
        recorder.stack.pop()

    return hook


@contextmanager
def _rehearsed(module: Unit, recorder: _ForwardRecorder) -> Iterator[None]:
    before = vars(module).get("forward")  # some wrappers set forward on the instance
    object.__setattr__(module, "forward", lambda *args: recorder.unit(module, args))
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(module, "forward")
        else:
            object.__setattr__(module, "forward", before)
