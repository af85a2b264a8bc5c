"""Nodes of torch's graphs as nodes of a program: operators, operations on sizes, blocks, types."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from holdfast.adapters.program.export_errors import operator_problem
from holdfast.adapters.program.node_origins import Origins
from holdfast.adapters.program.torch_operators import dtype_name, from_torch, schema_of
from holdfast.adapters.program.torch_sizes import SizeNames
from holdfast.core.errors import Unsupported
from holdfast.program.arguments import DeviceValue, FormatValue, Ref, Value
from holdfast.program.graph import AUTOCAST, ITEM, SET_GRAD, GraphBlock, Node, NodeType, ScalarType, TensorType
from holdfast.program.operator_table import is_allowed

SIZE_FUNCTIONS: Mapping[Any, str] = {
    operator.add: "size.add",
    operator.sub: "size.sub",
    operator.mul: "size.mul",
    operator.floordiv: "size.floordiv",
    operator.truediv: "size.truediv",
    operator.mod: "size.mod",
    operator.pow: "size.pow",
    operator.neg: "size.neg",
    operator.eq: "size.eq",
    operator.ne: "size.ne",
    operator.lt: "size.lt",
    operator.le: "size.le",
    operator.gt: "size.gt",
    operator.ge: "size.ge",
    operator.not_: "size.not",
    operator.and_: "size.and",
    operator.or_: "size.or",
    math.trunc: "size.int",
    torch.sym_min: "size.min",
    torch.sym_max: "size.max",
    torch.sym_int: "size.int",
    torch.sym_float: "size.float",
    torch.sym_not: "size.not",
    torch.sym_ite: "size.ite",
}
# Checks of what export assumed. The dtypes of inputs and weights are checked, and autocast may change others.
_LEFT_OUT = frozenset({"aten._assert_tensor_metadata.default"})
# Uninitialized memory becomes zeros.
_ZEROS = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}
_BLOCK_NAMES = {"wrap_with_set_grad_enabled": SET_GRAD, "wrap_with_autocast": AUTOCAST}


class GraphReader:
    """Reads the graphs of one export. `operators` collects the schema of every aten overload.

    `renamed` are the placeholders of tied weights, by the one that stands for all of them.
    """

    def __init__(
        self, sizes: SizeNames, origins: Origins, model_device: str | None, renamed: Mapping[str, str]
    ) -> None:
        self._sizes = sizes
        self._origins = origins
        self._device = model_device
        self._renamed = renamed
        self.operators: dict[str, str] = {}

    def nodes(self, module: fx.GraphModule) -> tuple[Node, ...]:
        """Return the calls of a graph in order."""
        found: list[Node] = []
        for node in module.graph.nodes:
            if node.op == "call_function" and str(node.target) not in _LEFT_OUT:
                found.append(self._node(node, module))
            elif node.op == "get_attr" and not isinstance(_attribute(module, node.target), fx.GraphModule):
                raise Unsupported(
                    f"the graph has the attribute {node.target}, which is not a part of the model's state"
                )
            elif node.op in ("call_method", "call_module"):
                raise Unsupported(f"the graph calls {node.target}, which is not an operator")
        return tuple(found)

    def outputs(self, module: fx.GraphModule) -> tuple[Value, ...]:
        (returned,) = (node for node in module.graph.nodes if node.op == "output")
        return tuple(self.value(value, "the outputs") for value in returned.args[0])

    def value(self, value: Any, where: str) -> Value:
        """Return an argument as a value; raises Unsupported for what a program cannot say."""
        if isinstance(value, fx.Node):
            return Ref(self._renamed.get(value.name, value.name))
        if isinstance(value, list | tuple):
            return tuple(self.value(item, where) for item in value)
        try:
            return from_torch(value, self._device)
        except TypeError as problem:
            raise Unsupported(f"{where}: {problem} cannot be an argument in a program") from None

    def type_of(self, value: Any) -> NodeType:
        """Return the type of what a node computes, from the fake value of the export."""
        if isinstance(value, torch.Tensor):
            return self.tensor_type(value)
        if isinstance(value, torch.SymInt):
            return ScalarType("int", self._sizes.size(value))
        for kind, classes in (("bool", (torch.SymBool, bool)), ("float", (torch.SymFloat, float))):
            if isinstance(value, classes):
                return ScalarType(kind)
        if isinstance(value, int):
            return ScalarType("int", value)
        if isinstance(value, list | tuple):
            return tuple(self.type_of(item) for item in value)
        return None

    def tensor_type(self, tensor: torch.Tensor) -> TensorType:
        if tensor.layout is not torch.strided:
            raise Unsupported(f"a tensor with the layout {tensor.layout}: programs have strided tensors only")
        return TensorType(dtype_name(tensor.dtype), tuple(self._sizes.size(size) for size in tensor.shape))

    def _node(self, node: fx.Node, module: fx.GraphModule) -> Node:
        target, where = node.target, f"the node {node.name}"
        if target is operator.getitem:
            op = ITEM
        elif not isinstance(target, torch._ops.OperatorBase) and target in SIZE_FUNCTIONS:
            op = SIZE_FUNCTIONS[target]
        elif isinstance(target, torch._ops.HigherOrderOperator):
            return self._block_node(node, module)
        else:
            return self._call(node, self._checked_name(node), where)
        made = Node(node.name, op, tuple(self.value(value, where) for value in node.args), {}, self._type(node))
        return replace(made, origin=self._origins.of(node))

    def _type(self, node: fx.Node) -> NodeType:
        return self.type_of(node.meta.get("val"))

    def _checked_name(self, node: fx.Node) -> str:
        target = node.target
        name = str(target) if isinstance(target, torch._ops.OpOverload) else _function_name(target)
        if name in _ZEROS or (
            isinstance(target, torch._ops.OpOverload) and name.startswith("aten.") and is_allowed(name)
        ):
            return name
        origin = self._origins.of(node)
        raise operator_problem(
            name, f"{origin.module or 'the model'} at {origin.line}" if origin.line else origin.module
        )

    def _call(self, node: fx.Node, name: str, where: str) -> Node:
        overload: Any = node.target
        args = tuple(self.value(value, where) for value in node.args)
        kwargs = {key: self.value(value, where) for key, value in node.kwargs.items()}
        if name in _ZEROS:
            name, overload = _ZEROS[name], _overload(_ZEROS[name])
            memory = kwargs.pop("memory_format", None) if name != "aten.zeros_like.default" else None
            if isinstance(memory, FormatValue) and memory.name not in ("contiguous_format", "preserve_format"):
                raise Unsupported(
                    f"{where}: uninitialized memory in the format {memory.name} is not allowed in a program"
                )
        if kwargs.get("pin_memory") is False:
            kwargs.pop("pin_memory")
        self.operators[name] = str(schema_of(overload))
        return Node(node.name, name, args, kwargs, self._type(node), self._origins.of(node))

    def _block_node(self, node: fx.Node, module: fx.GraphModule) -> Node:
        kind = _BLOCK_NAMES.get(str(node.target))
        origin = self._origins.of(node)
        if kind is None:
            raise Unsupported(
                f"{node.target} (in {origin.module or 'the model'}) is an operator with functions as arguments, which "
                "a program does not have: only torch.no_grad, torch.enable_grad and torch.autocast make blocks. Export "
                "the model without it, for example with attention and control flow in plain torch"
            )
        position = next(index for index, value in enumerate(node.args) if _is_graph(value, module))
        inner = _attribute(module, node.args[position].target)  # type: ignore[union-attr]
        own, rest = node.args[:position], node.args[position + 1 :]
        where = f"the node {node.name}"
        values = [self.value(value, where) for value in (*own, *rest)]
        if kind == AUTOCAST:
            values[0] = DeviceValue("model" if own[0] == self._device else str(own[0]))
        block = self._block(inner)
        types = self.type_of([_meta(value) for value in _returned(inner)])
        first = block.nodes[0].origin if block.nodes else origin
        origin = replace(origin, line=origin.line or first.line)
        return Node(node.name, kind, tuple(values), {}, types, origin, block)

    def _block(self, module: fx.GraphModule) -> GraphBlock:
        """Return a graph inside of a node; its names are its own."""
        outer, self._renamed = self._renamed, {}
        inputs = tuple(found.name for found in module.graph.nodes if found.op == "placeholder")
        block = GraphBlock(inputs, self.nodes(module), self.outputs(module))
        self._renamed = outer
        return block


def _returned(module: fx.GraphModule) -> list[Any]:
    (returned,) = (node for node in module.graph.nodes if node.op == "output")
    values: Any = returned.args[0]
    return list(values)


def _meta(value: Any) -> Any:
    return value.meta.get("val") if isinstance(value, fx.Node) else value


def _is_graph(value: Any, module: fx.GraphModule) -> bool:
    is_attribute = isinstance(value, fx.Node) and value.op == "get_attr"
    return is_attribute and isinstance(_attribute(module, value.target), fx.GraphModule)


def _attribute(module: fx.GraphModule, target: Any) -> Any:
    value: Any = module
    for part in str(target).split("."):
        value = getattr(value, part)
    return value


def _overload(name: str) -> Any:
    from holdfast.adapters.program.torch_operators import overload_named

    return overload_named(name)


def _function_name(target: Any) -> str:
    return str(getattr(target, "__name__", target)) if callable(target) else str(target)
