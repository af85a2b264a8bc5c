"""A program as a torch.fx.GraphModule, for torch.compile."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from holdfast.adapters.program.interpreter import size_function
from holdfast.adapters.program.torch_operators import to_torch
from holdfast.core.errors import Unsupported
from holdfast.program.arguments import Ref, SliceValue, Value
from holdfast.program.graph import ITEM, SET_GRAD, GraphBlock, Node
from holdfast.program.model_program import Program
from holdfast.program.operator_table import SIZE_OPERATIONS


class FxProgram(nn.Module):
    """The graph of a program with its parameters; from leaves of inputs to leaves of outputs."""


def fx_module(
    program: Program, weights: Sequence[torch.Tensor], operators: Mapping[str, Any], device: torch.device
) -> fx.GraphModule:
    """Return the graph with `weights`, in the order of the state. No name of the program is in the generated source."""
    root = FxProgram()
    writer = _GraphWriter(operators, device)
    for index, weight in enumerate(weights):
        name = f"w{index}"
        if isinstance(weight, nn.Parameter):
            root.register_parameter(name, weight)
        else:
            root.register_buffer(name, weight, persistent=False)
        writer.define(program.state[index].name, writer.graph.get_attr(name))
    for index, entry in enumerate(program.inputs):
        writer.define(entry.name, writer.graph.placeholder(f"x{index}"))
    written = {change.target: writer.found[change.target] for change in program.mutations}
    for name, node in written.items():
        writer.define(name, writer.call(torch.ops.aten.clone.default, (node,), {}))
    writer.run(program.block)
    for change in program.mutations:
        value = writer.call(torch.ops.aten.detach.default, (writer.found[change.value.name],), {})
        writer.call(torch.ops.aten.copy_.default, (written[change.target], value), {})
    writer.graph.output(tuple(writer.argument(value) for value in program.outputs))
    return fx.GraphModule(root, writer.graph)


class _GraphWriter:
    """Writes the nodes of blocks into one graph. Values are found by the names of the program, in one block each."""

    def __init__(self, operators: Mapping[str, Any], device: torch.device) -> None:
        self.graph = fx.Graph()
        self.found: dict[str, fx.Node] = {}
        self._operators, self._device = operators, device
        self._count = 0

    def define(self, name: str, node: fx.Node) -> None:
        self.found[name] = node

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node("call_function", function, args, kwargs, name=f"v{self._count}")
        self._count += 1
        return node

    def argument(self, value: Value) -> Any:
        if isinstance(value, Ref):
            return self.found[value.name]
        if isinstance(value, tuple):
            return [self.argument(item) for item in value]
        if isinstance(value, SliceValue):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        return to_torch(value, self._device)

    def run(self, block: GraphBlock) -> None:
        for node in block.nodes:
            self.define(node.name, self._write(node))

    def _write(self, node: Node) -> Any:
        if node.block is not None:
            return self._write_block(node, node.block)
        args = tuple(self.argument(value) for value in node.args)
        if node.op == ITEM:
            return args[0][args[1]] if isinstance(args[0], list) else self.call(operator.getitem, args, {})
        if node.op in SIZE_OPERATIONS:
            return self.call(size_function(node.op), args, {})
        kwargs = {name: self.argument(value) for name, value in node.kwargs.items()}
        return self.call(self._operators[node.op], args, kwargs)

    def _write_block(self, node: Node, block: GraphBlock) -> list[Any]:
        """Write the nodes of a block in place, between calls that set the mode and restore it."""
        if node.op != SET_GRAD:
            raise Unsupported("a program with torch.autocast inside has no .fx(): run it as it is")
        outer = self.found
        inputs = [self.argument(value) for value in node.args[1:]]
        before = self.call(torch.is_grad_enabled, (), {})
        self.call(torch._C._set_grad_enabled, (node.args[0],), {})
        self.found = dict(zip(block.inputs, inputs, strict=True))
        self.run(block)
        results = [self.argument(value) for value in block.outputs]
        self.found = outer
        self.call(torch._C._set_grad_enabled, (before,), {})
        return results
