"""`ProgramModule`: a program with weights as an nn.Module, differentiable, without the class that made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from holdfast.adapters.program.export_constants import to_tensor
from holdfast.adapters.program.fx_module import fx_module
from holdfast.adapters.program.input_checks import InputChecks
from holdfast.adapters.program.interpreter import Interpreter
from holdfast.adapters.program.operator_versions import checked_operators
from holdfast.adapters.program.sharded_weights import mesh_of, refuse_sharded_parts, replicated, replicating
from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from holdfast.program.graph import CONSTANT, PARAMETER, GraphBlock, StateEntry
from holdfast.program.model_program import Program
from holdfast.program.structures import StructureProblem, flatten, unflatten

_Holder = tuple[dict[str, torch.Tensor | None], str]
_MODE = "training"
_CONSTANTS = "program.constants"  # with a dot, which no part of a key has


class ProgramModule(nn.Module):
    """A program that runs: made by `holdfast.load_program`.

    It is called as the model was at its export. Its state_dict has the keys of the checkpoint, tied weights are one
    parameter under all of their keys, and parameters may be replaced, sharded as DTensors, and trained.
    """

    def __init__(
        self, program: Program, constants: Mapping[str, Any] | None = None, where: str = "the program"
    ) -> None:
        super().__init__()
        self.program = program
        self._where = where
        self._operators = checked_operators(program, where)
        self._checks = InputChecks(program)
        self._interpreters: dict[tuple[torch.device, DeviceMesh | None], Interpreter] = {}
        places = {name: index for index, name in enumerate(program.names)}
        self._targets = [places[change.target] for change in program.mutations]
        self.training = program.training
        _require_free(program, where)
        self._holders: list[_Holder] = []  # filled last: a key may have the name of an attribute above
        self._tied: list[list[_Holder]] = []
        for holders in [_hold(self, entry) for entry in program.state]:
            self._holders.append(holders[0])
            if len(holders) > 1:
                self._tied.append(holders)
        self._fill_constants(program.constants if constants is None else constants)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program: inputs and outputs have the structure of those of the model."""
        inputs = self.flat_inputs(args, kwargs)
        weights = [held[name] for held, name in self._holders]
        device, mesh = _device_of(weights, inputs), mesh_of(weights)
        if (device, mesh) not in self._interpreters:
            self._prepare(device, mesh)
            weights = [held[name] for held, name in self._holders]
        if device.type == "meta":  # shapes only: the constants keep their values
            weights = [weight if weight is None else weight.to(device) for weight in weights]
        if mesh is not None:
            refuse_sharded_parts(self, self._where)
            weights = [replicated(weight, mesh) for weight in weights]
            inputs = [replicated(value, mesh) for value in inputs]
        return self._run(self._interpreters[device, mesh], weights, inputs)

    def flat_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of the inputs, checked: structure, dtypes, shapes, sizes and guards."""
        tree = self.program.input_structure
        try:
            if tree.kind == "tuple" and [part.kind for part in tree.items] == ["tuple", "dict"]:
                args, kwargs = _by_position(args, kwargs, self.program)
                leaves = list(flatten((tuple(args), dict(kwargs)), tree))
            else:
                leaves = list(flatten(args[0] if len(args) == 1 else args, tree))
        except StructureProblem as problem:
            raise Mismatch(f"{self._where}: {problem}") from None
        self._checks.check(leaves, self._where)
        return leaves

    def _run(self, run: Interpreter, weights: list[Any], inputs: list[Any]) -> Any:
        values = [*weights, *inputs]
        written = {index: values[index] for index in self._targets}
        for index, tensor in written.items():
            values[index] = tensor.clone()  # what autograd saves is not written below
        results = run(values)
        outputs = results[: len(self.program.outputs)]
        for index, result in zip(self._targets, results[len(outputs) :], strict=True):
            with torch.no_grad():
                written[index].copy_(result)
        return unflatten(outputs, self.program.output_structure)

    def _prepare(self, device: torch.device, mesh: DeviceMesh | None) -> None:
        """Make the nodes ready to run on a device, and move constants that are not there yet."""
        block = self.program.block
        results = (*block.outputs, *(change.value for change in self.program.mutations))
        block = GraphBlock(block.inputs, block.nodes, results)
        operators = self._operators
        if mesh is not None:
            operators = {op: replicating(function, mesh) for op, function in operators.items()}
        self._interpreters[device, mesh] = Interpreter(block, operators.__getitem__, device)
        if device.type != "meta":
            self.to_device(device)

    def fx(self) -> fx.GraphModule:
        """Return the program as a torch.fx.GraphModule for torch.compile, on the same parameters.

        torch generates Python source for such a module and executes it, as it does for every one. The source has
        names that Holdfast makes: no name of the file is in it. It takes the leaves of the inputs in the order of
        `program.inputs` (see `flat_inputs`) and returns those of the outputs.
        """
        weights = [held[name] for held, name in self._holders]
        device = next((weight.device for weight in weights if weight is not None), torch.device("cpu"))
        return fx_module(self.program, [weight for weight in weights if weight is not None], self._operators, device)

    def take_weights(self, given: Any, device: Any = None, *, cast: bool = False) -> None:
        """Fill the weights from tensors by key, or from a module: copies. Raises Mismatch for missing or other ones."""
        tensors = given.state_dict() if isinstance(given, nn.Module) else given
        if not isinstance(tensors, Mapping):
            raise InvalidArgument(f"weights={type(given).__name__}: give a checkpoint, a dict of tensors, or a module")
        for (held, name), entry in zip(self._holders, self.program.state, strict=True):
            if entry.kind != CONSTANT:
                key = next((key for key in (entry.key, *entry.aliases) if key in tensors), None)
                if key is None:
                    raise Mismatch(f"{self._where}: the weights lack {entry.key}")
                live = held[name]
                assert live is not None
                torch.utils.swap_tensors(live, _filled(live, tensors[key], entry, device, cast))  # type: ignore[no-untyped-call]

    def to_device(self, device: Any) -> None:
        """Move the constants to a device, by default to that of the weights."""
        for (held, name), entry in zip(self._holders, self.program.state, strict=True):
            value = held[name]
            if entry.kind == CONSTANT and value is not None:
                held[name] = value.to(device or self._weights_device() or value.device)

    def _weights_device(self) -> torch.device | None:
        entries = zip(self._holders, self.program.state, strict=True)
        weights = [held[name] for (held, name), entry in entries if entry.kind != CONSTANT]
        return next((weight.device for weight in weights if weight is not None), None)

    def _apply(self, fn: Any, recurse: bool = True) -> ProgramModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for (first, name), *others in self._tied:  # `to_empty` makes a tensor for each
            for held, other in others:
                held[other] = first[name]
        return self

    def extra_repr(self) -> str:
        return repr(self.program)

    def _fill_constants(self, constants: Mapping[str, Any]) -> None:
        for (held, name), entry in zip(self._holders, self.program.state, strict=True):
            if entry.kind == CONSTANT:
                if entry.key not in constants:
                    raise Mismatch(f"{self._where}: the constant {entry.key!r} is missing")
                held[name] = _constant(constants[entry.key], entry, self._where)


class _Constants(nn.Module):
    """The constants of a program. They keep their values when the module is moved, or emptied by `to_empty`."""

    def _apply(self, fn: Any, recurse: bool = True) -> _Constants:
        kept = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, value in kept.items():
            made = self._buffers[name]
            if value is not None and made is not None and not value.is_meta:
                self._buffers[name] = value.to(made)
        return self


def _device_of(weights: list[Any], inputs: list[Any]) -> torch.device:
    first = next((value for value in (*weights, *inputs) if isinstance(value, torch.Tensor)), None)
    return torch.device("cpu") if first is None else first.device


def _filled(live: torch.Tensor, given: Any, entry: StateEntry, device: Any, cast: bool) -> torch.Tensor:
    """Return a given tensor as the weight of an entry, with memory of its own."""
    tensor = torch.as_tensor(given).detach()
    if tuple(tensor.shape) != tuple(live.shape) or (tensor.dtype != live.dtype and not cast):
        raise Mismatch(
            f"the weight {entry.key} is {tensor.dtype} {list(tensor.shape)}, but the program has {live.dtype} "
            f"{list(live.shape)}" + ("" if tensor.dtype == live.dtype else "; cast=True converts dtypes")
        )
    made = torch.empty_like(tensor, dtype=live.dtype, device=tensor.device if device is None else device)
    made.copy_(tensor)
    return nn.Parameter(made, live.requires_grad) if isinstance(live, nn.Parameter) else made


def _constant(array: Any, entry: StateEntry, where: str) -> torch.Tensor:
    tensor = array if isinstance(array, torch.Tensor) else to_tensor(array, entry.type.dtype)
    expected = tuple(entry.type.shape), entry.type.dtype
    found = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if found != expected:
        raise Mismatch(
            f"{where}: the constant {entry.key!r} is {found[1]} {list(found[0])}, not {expected[1]} {expected[0]}"
        )
    return tensor


def _require_free(program: Program, where: str) -> None:
    """Raise Unsupported for a key that no module can have: torch sets `training` on every one."""
    for entry in program.state:
        for key in (entry.key, *entry.aliases):
            if entry.kind != CONSTANT and _MODE in key.split("."):
                raise Unsupported(f"{where}: the key {key!r}: torch's modules have {_MODE!r} for their mode")


def _hold(root: nn.Module, entry: StateEntry) -> list[_Holder]:
    """Put a weight on the meta device into the module under its keys; return its places, the first of which is read.

    The dicts of modules are written directly: a key is never the name of an attribute.
    """
    shape = tuple(int(size) for size in entry.type.shape if isinstance(size, int))
    tensor = torch.empty(shape, dtype=getattr(torch, entry.type.dtype), device="meta")
    holders = []
    if entry.kind == CONSTANT:  # in a place of its own: its key may be that of a weight
        owner = root._modules.setdefault(_CONSTANTS, _Constants())
        assert owner is not None
        owner._buffers[entry.name] = tensor
        owner._non_persistent_buffers_set.add(entry.name)
        return [(owner._buffers, entry.name)]
    is_float = tensor.is_floating_point() or tensor.is_complex()
    value = nn.Parameter(tensor, requires_grad=is_float and not entry.frozen) if entry.kind == PARAMETER else tensor
    for key in (entry.key, *entry.aliases):
        path, _, name = key.rpartition(".")
        owner = root
        for part in path.split(".") if path else ():
            owner = _child(owner, part)
        held: dict[str, Any] = owner._parameters if entry.kind == PARAMETER else owner._buffers
        held[name] = value
        holders.append((held, name))
    return holders


def _child(owner: nn.Module, name: str) -> nn.Module:
    if name not in owner._modules:
        owner._modules[name] = nn.Module()
    child = owner._modules[name]
    assert child is not None
    return child


def _by_position(
    args: Sequence[Any], kwargs: Mapping[str, Any], program: Program
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs as the export had them: by position there and by name here, or the other way."""
    positional, named = program.input_structure.items
    args, kwargs = list(args), dict(kwargs)
    first = 0
    for index, part in enumerate(positional.items):
        name = program.inputs[first].name if part.kind == "leaf" else ""
        if index == len(args) and name in kwargs and name not in named.keys:
            args.append(kwargs.pop(name))
        first += part.leaves
    for key in named.keys:
        if len(args) > len(positional.items) and key not in kwargs:
            kwargs[key] = args.pop(len(positional.items))
    return tuple(args), kwargs


def state_holders(module: ProgramModule) -> Iterator[tuple[StateEntry, torch.Tensor | None]]:
    """Yield the weights of a module with their entries."""
    for entry, (held, name) in zip(module.program.state, module._holders, strict=True):
        yield entry, held[name]
