"""`export_program`: a live model as a `Program`, by torch.export, once and outside of any save."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from holdfast.adapters.module import ModuleView, clean_key, unwrap, view_module
from holdfast.adapters.program.export_constants import constant_values
from holdfast.adapters.program.export_errors import check_inputs, decomposition_problem, export_problem
from holdfast.adapters.program.graph_nodes import GraphReader
from holdfast.adapters.program.node_origins import Origins
from holdfast.adapters.program.torch_operators import from_torch
from holdfast.adapters.program.torch_sizes import SizeNames, bounds_of, guards_of, shape_env_of
from holdfast.core.errors import HoldfastError, InvalidArgument, Unsupported
from holdfast.core.warnings import warn
from holdfast.program.arguments import Ref
from holdfast.program.graph import (
    BUFFER,
    CONSTANT,
    CORE,
    PARAMETER,
    TRAINING,
    InputEntry,
    Mutation,
    ScalarType,
    SpecializedSize,
    StateEntry,
    TensorType,
)
from holdfast.program.model_program import Program
from holdfast.program.sizes import symbols_of
from holdfast.program.structures import Structure
from holdfast.version import __version__

_KINDS = {"PARAMETER": PARAMETER, "BUFFER": BUFFER, "CONSTANT_TENSOR": CONSTANT}


def export_program(
    model: nn.Module,
    example_inputs: Sequence[Any] | Mapping[str, Any] | torch.Tensor,
    dynamic_shapes: Any = None,
    decompose: bool = False,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> Program:
    """Return a model as a program: a graph of aten operators as plain data, with weights as keys.

    `example_inputs` are the positional inputs as a tuple, or those by name as a dict; `example_kwargs` those by name
    beside positional ones. `dynamic_shapes` is as torch.export takes it; with `torch.export.Dim.AUTO` torch finds out
    which sizes may differ. Without it every size is that of the example. The model is on one device, or on the meta
    device: no weights are read. It is exported in its mode: `model.train()` and `model.eval()` give two programs.
    `decompose=True` gives a program in core aten, with a node for each elementary operator.

    Raises Unsupported, by name, for custom operators, branches on the values of tensors, caches as inputs, and guards
    that cannot be written; InvalidArgument for inputs and dynamic_shapes that do not fit the model.
    """
    model = unwrap(model)
    args, kwargs = _inputs_of(example_inputs)
    kwargs |= example_kwargs or {}
    _device_of(model)
    check_inputs(model, args, kwargs)
    exported = _exported(model, args, kwargs, dynamic_shapes)
    return program_of(exported, model, dynamic_shapes, _decomposed(exported, model) if decompose else None)


def program_of(
    exported: ExportedProgram, model: nn.Module, dynamic_shapes: Any = None, core: ExportedProgram | None = None
) -> Program:
    """Return the program of a model that torch has exported; with `core`, what torch decomposed that to, in core aten.

    Raises Unsupported, by name, for what a program cannot have.
    """
    device, view = _device_of(model), view_module("model", model, {})
    composites = None if core is None else dict(_calls(exported.graph_module))
    return _Exporter(model, view, core or exported, composites, device).program(dynamic_shapes)


def _inputs_of(examples: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(examples, torch.Tensor):
        return (examples,), {}
    if isinstance(examples, Mapping):
        return (), dict(examples)
    if not isinstance(examples, Sequence) or isinstance(examples, str):
        raise InvalidArgument(
            f"example_inputs={type(examples).__name__}: give a tuple of inputs, or a dict of them by name"
        )
    return tuple(examples), {}


def _exported(model: nn.Module, args: Any, kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
        except HoldfastError:
            raise
        except Exception as error:
            raise export_problem(error, model) from error


def _decomposed(exported: ExportedProgram, model: nn.Module) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            core: ExportedProgram = exported.run_decompositions()
            return core
        except Exception as error:
            raise decomposition_problem(error, model) from error


def _calls(module: fx.GraphModule) -> Iterator[tuple[str, fx.Node]]:
    """Yield every call of a graph and of the graphs inside of it, by name."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            yield from ((node.name, node) for node in part.graph.nodes if node.op == "call_function")


class _Exporter:
    """Turns one exported graph into a program."""

    def __init__(
        self,
        model: nn.Module,
        view: ModuleView,
        exported: ExportedProgram,
        composites: dict[str, fx.Node] | None,
        device: str,
    ) -> None:
        self._model = model
        self._view = view
        self._exported = exported
        self._signature = exported.graph_signature
        self._placeholders = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
        self._sizes = SizeNames()
        self._origins = Origins(composites)
        self._dialect = TRAINING if composites is None else CORE
        renamed = {spec.arg.name: owner for spec, owner in self._state_specs()}
        self._reader = GraphReader(self._sizes, self._origins, device, renamed)

    def program(self, dynamic_shapes: Any) -> Program:
        self._refuse_specs()
        declared = self._declared_dims(dynamic_shapes)
        nodes = self._reader.nodes(self._exported.graph_module)
        inputs = tuple(map(self._input, self._user_inputs()))
        state = self._state()
        shape_env = shape_env_of(self._exported.graph)
        guards = () if shape_env is None else guards_of(shape_env, self._sizes)
        outputs, mutations = self._outputs()
        found = Program(
            inputs=inputs,
            nodes=nodes,
            outputs=outputs,
            state=tuple(state),
            input_structure=_structure(self._exported.call_spec.in_spec),
            output_structure=_structure(self._exported.call_spec.out_spec),
            operators=dict(sorted(self._reader.operators.items())),
            guards=guards,
            mutations=mutations,
            modules=self._modules(),
            specialized=self._specialized(declared, inputs),
            dialect=self._dialect,
            training=self._model.training,
            writer={"holdfast": __version__, "torch": str(torch.__version__)},
            constants=self._constants(),
            symbols=self._symbols(),
        )
        return found.check(f"the program of {type(self._model).__name__}")

    def _user_inputs(self) -> list[Any]:
        return [spec for spec in self._signature.input_specs if spec.kind.name == "USER_INPUT"]

    def _refuse_specs(self) -> None:
        for spec in self._signature.input_specs:
            if spec.kind.name == "CUSTOM_OBJ":
                raise Unsupported(f"the model holds the script object {spec.target}, which a program cannot have")
            if spec.kind.name == "TOKEN":
                raise Unsupported("the model calls an operator with a side effect (an effect token), such as a print")

    def _modules(self) -> dict[str, str]:
        kinds = {clean_key(path): type(part) for path, part in self._model.named_modules(remove_duplicate=False)}
        live = {path: f"{kind.__module__}.{kind.__qualname__}" for path, kind in kinds.items()}
        return {path: live.get(path, kind) for path, kind in sorted({"": "", **self._origins.modules}.items())}

    def _input(self, spec: Any) -> InputEntry:
        node = self._placeholders[spec.arg.name]
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            return InputEntry(spec.arg.name, self._reader.tensor_type(value))
        if isinstance(value, torch.SymInt):
            return InputEntry(spec.arg.name, ScalarType("int", self._sizes.size(value)))
        return InputEntry(spec.arg.name, value=from_torch(getattr(spec.arg, "value", value), None))

    def _state(self) -> Iterator[StateEntry]:
        """Yield the weights: of tied ones only the key that is stored, with the others as its aliases."""
        for spec, owner in self._state_specs():
            if owner != spec.arg.name:
                continue
            kind = _KINDS[spec.kind.name] if spec.persistent is not False else CONSTANT
            key = clean_key(spec.target)
            aliases: tuple[str, ...] = ()
            if kind != CONSTANT:
                stored = self._view.stored_key(key)
                names = [stored, *self._view.aliases_of(stored)]
                key, aliases = stored, tuple(name for name in names if name != stored)
            value = self._placeholders[spec.arg.name].meta["val"]
            frozen = kind == PARAMETER and not self._exported.state_dict[spec.target].requires_grad
            yield StateEntry(spec.arg.name, kind, key, self._reader.tensor_type(value), aliases, frozen)

    def _state_specs(self) -> list[tuple[Any, str]]:
        """Return the specs of the state, each with the placeholder that stands for its tensor."""
        owners: dict[str, str] = {}
        found = []
        for spec in self._signature.input_specs:
            if spec.kind.name in _KINDS:
                persistent = spec.persistent is not False and spec.kind.name != "CONSTANT_TENSOR"
                key = clean_key(spec.target)
                stored = self._view.stored_key(key) if persistent else f"\0{key}"
                found.append((spec, owners.setdefault(stored, spec.arg.name)))
        return found

    def _outputs(self) -> tuple[tuple[Any, ...], tuple[Mutation, ...]]:
        values = self._reader.outputs(self._exported.graph_module)
        targets = {clean_key(spec.target): owner for spec, owner in self._state_specs()}
        outputs, mutations = [], []
        for spec, value in zip(self._signature.output_specs, values, strict=True):
            kind = spec.kind.name
            if kind == "USER_OUTPUT":
                outputs.append(value)
            elif kind in ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION") and isinstance(value, Ref):
                target = spec.target if kind == "USER_INPUT_MUTATION" else targets[clean_key(spec.target)]
                mutations.append(Mutation(target, value))
            else:
                raise Unsupported(f"the graph returns a {kind.lower()} ({spec.target}), which a program cannot have")
        return tuple(outputs), tuple(mutations)

    def _symbols(self) -> dict[str, tuple[int, int | None]]:
        ranges = {str(symbol): interval for symbol, interval in self._exported.range_constraints.items()}
        found = {}
        for name, symbol in self._sizes.known.items():
            found[name] = bounds_of(ranges[symbol]) if symbol in ranges else (0, None)
        return dict(sorted(found.items()))

    def _declared_dims(self, dynamic_shapes: Any) -> dict[tuple[int, int], str]:
        """Return the dims that were declared dynamic, by input and dim, with the name of the Dim; name the symbols."""
        if dynamic_shapes is None:
            return {}
        leaves = _shape_leaves(dynamic_shapes, self._exported, self._model)
        declared = {}
        for position, (spec, dims) in enumerate(zip(self._user_inputs(), leaves, strict=False)):
            value = self._placeholders[spec.arg.name].meta.get("val")
            for dim, declaration in _dims_of(dims):
                if declaration in (None, Dim.STATIC) or isinstance(declaration, int):
                    continue
                name = getattr(declaration, "__name__", "")
                declared[position, dim] = name
                size = value.shape[dim] if isinstance(value, torch.Tensor) else None
                if name and isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    self._sizes.prefer(size.node.expr, name)
        return declared

    def _specialized(self, declared: Mapping[tuple[int, int], str], inputs: Sequence[InputEntry]) -> tuple[Any, ...]:
        """Return the dims that were declared dynamic and became constants, with a warning."""
        found = []
        for position, dim in declared:
            kind = inputs[position].type
            if isinstance(kind, TensorType) and not list(symbols_of(kind.shape[dim])):
                found.append(SpecializedSize(inputs[position].name, dim, kind.shape[dim]))  # type: ignore[arg-type]
        if found:
            texts = ", ".join(f"dim {size.dim} of {size.input} is {size.size}" for size in found)
            warn(
                f"torch made sizes constant that were declared dynamic: {texts}. The program refuses other sizes; the "
                "model decides by them in Python"
            )
        return tuple(found)

    def _constants(self) -> dict[str, Any]:
        specs = [spec for spec, owner in self._state_specs() if owner == spec.arg.name]
        keys = [spec.target for spec in specs if spec.persistent is False or spec.kind.name == "CONSTANT_TENSOR"]
        return constant_values(self._model, {key: self._exported.constants[key] for key in keys})


def _device_of(model: nn.Module) -> str:
    """Return the type of the device that the model is on, "cpu" for a model without tensors."""
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if len(kinds) > 1:
        raise InvalidArgument(
            f"the model is on several devices ({', '.join(sorted(kinds))}): move it to one, or to meta"
        )
    return next(iter(kinds), "cpu")


def _structure(spec: Any) -> Structure:
    """Return torch's structure of inputs or outputs; classes other than containers become dicts or lists."""
    kind = spec.type
    if kind is None or (spec.num_children == 0 and spec.num_leaves == 1):
        return Structure()
    items = tuple(_structure(child) for child in spec.children())
    keys = spec.context
    if kind is tuple or kind is list:
        return Structure("tuple" if kind is tuple else "list", items)
    was = "" if kind is dict else f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(keys, list | tuple) and len(keys) == len(items) and all(isinstance(key, str) for key in keys):
        return Structure("dict", items, tuple(keys), was)
    if hasattr(kind, "_fields") and len(kind._fields) == len(items):
        return Structure("dict", items, tuple(kind._fields), was)
    return Structure("list", items, (), was)


def _shape_leaves(dynamic_shapes: Any, exported: ExportedProgram, model: nn.Module) -> list[Any]:
    """Return the declaration for every leaf of the inputs, in order."""
    indexes = iter(range(exported.call_spec.in_spec.num_leaves))
    args, kwargs = pytree.tree_unflatten(list(indexes), exported.call_spec.in_spec)
    if isinstance(dynamic_shapes, Mapping):
        names = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        spread: dict[str, Any] = {}
        for name, value in names.items():
            is_spread = isinstance(value, dict) and name not in kwargs and name not in dynamic_shapes
            spread |= value if is_spread else {name: value}
        pairs = [(value, dynamic_shapes.get(name)) for name, value in spread.items()]
    else:
        pairs = list(zip((*args, *kwargs.values()), dynamic_shapes, strict=False))
    by_index: dict[int, Any] = {}
    for value, declaration in pairs:
        _assign(value, declaration, by_index)
    return [by_index.get(index) for index in range(exported.call_spec.in_spec.num_leaves)]


def _assign(value: Any, declaration: Any, found: dict[int, Any]) -> None:
    if isinstance(value, int):
        found[value] = declaration
    elif declaration is not None:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            inner = declaration.get(key) if isinstance(declaration, Mapping) else declaration[key]
            _assign(part, inner, found)


def _dims_of(declaration: Any) -> Iterator[tuple[int, Any]]:
    if isinstance(declaration, Mapping):
        yield from declaration.items()
    elif isinstance(declaration, list | tuple):
        yield from enumerate(declaration)
