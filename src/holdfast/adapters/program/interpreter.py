"""Runs the nodes of a program one after the other: no generated source, no class of the model.

Every value has a slot in a list. Constants have slots, too, so that the arguments of a call are picked in one step;
a slot is emptied after its last use.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from holdfast.adapters.program.torch_operators import to_torch
from holdfast.core.errors import InvalidArgument
from holdfast.program import program_limits as most
from holdfast.program.arguments import Ref, Value, references
from holdfast.program.graph import ITEM, SET_GRAD, GraphBlock, Node
from holdfast.program.operator_table import SIZE_OPERATIONS

Resolve = Callable[[str], Any]


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int) and not -64 <= exponent <= 64:
        raise InvalidArgument(f"the exponent {exponent} of a size is not between -64 and 64")
    return base**exponent


_SIZES: Mapping[str, Callable[..., Any]] = {
    "size.add": operator.add,
    "size.sub": operator.sub,
    "size.mul": operator.mul,
    "size.floordiv": operator.floordiv,
    "size.truediv": operator.truediv,
    "size.mod": operator.mod,
    "size.pow": _power,
    "size.neg": operator.neg,
    "size.min": torch.sym_min,
    "size.max": torch.sym_max,
    "size.int": torch.sym_int,
    "size.float": torch.sym_float,
    "size.eq": operator.eq,
    "size.ne": operator.ne,
    "size.lt": operator.lt,
    "size.le": operator.le,
    "size.gt": operator.gt,
    "size.ge": operator.ge,
    "size.not": torch.sym_not,
    "size.and": operator.and_,
    "size.or": operator.or_,
    "size.ite": torch.sym_ite,
}
assert set(_SIZES) == set(SIZE_OPERATIONS)


def size_function(op: str) -> Callable[..., Any]:
    """Return the function of an operation on sizes; the result is a number of at most 64 bits."""
    function = _SIZES[op]

    def compute(*terms: Any) -> Any:
        result = function(*terms)
        if type(result) is int and not -most.SIZE_MAX - 1 <= result <= most.SIZE_MAX:
            raise InvalidArgument(f"{op} computes a size of more than 64 bits")
        return result

    return compute


# A step: the function, how its arguments are picked (None: one argument, in the slot that follows), its arguments by
# name, its own slot, and the slots to empty after it.
_Step = tuple[Callable[..., Any], Callable[[list[Any]], Any] | None, int, Any, int, tuple[int, ...]]


class Interpreter:
    """A block that is ready to run. `resolve` returns the function of an operator; `device` is that of the weights."""

    def __init__(self, block: GraphBlock, resolve: Resolve, device: torch.device) -> None:
        self._slots: dict[str, int] = {}
        self._initial: list[Any] = []
        self._steps: list[_Step] = []
        self._lists: list[int] = []  # slots of lists that the next step takes
        self._resolve, self._device = resolve, device
        for name in block.inputs:
            self._slots[name] = self._new_slot()
        self._emptied = _last_uses(block)
        for node in block.nodes:
            self._add(node)
        self._outputs = [self._slot_of(value) for value in block.outputs]
        self._rest = self._initial[len(block.inputs) :]

    def __call__(self, inputs: Iterable[Any]) -> list[Any]:
        """Run on the values of the inputs, in order; return the outputs."""
        values = [*inputs, *self._rest]
        for function, pick, single, named, slot, emptied in self._steps:
            if pick is None:
                values[slot] = function(values[single]) if named is None else function(values[single], **named(values))
            elif named is None:
                values[slot] = function(*pick(values))
            else:
                values[slot] = function(*pick(values), **named(values))
            for index in emptied:
                values[index] = None
        return [values[slot] for slot in self._outputs]

    def _new_slot(self, value: Any = None) -> int:
        self._initial.append(value)
        return len(self._initial) - 1

    def _slot_of(self, value: Value) -> int:
        """Return the slot of an argument. A list with computed items is built by a step of its own."""
        if isinstance(value, Ref):
            return self._slots[value.name]
        if isinstance(value, tuple) and any(True for _ in references(value)):
            slot = self._new_slot()
            self._step(_as_list, [self._slot_of(item) for item in value], {}, slot, ())
            self._lists.append(slot)
            return slot
        return self._new_slot(self._constant(value))

    def _constant(self, value: Value) -> Any:
        if isinstance(value, tuple):
            return [self._constant(item) for item in value]
        return to_torch(value, self._device)

    def _add(self, node: Node) -> None:
        function, args = self._function(node)
        slots = [self._slot_of(value) for value in args]
        named = {name: self._slot_of(value) for name, value in node.kwargs.items()}
        slot = self._slots[node.name] = self._new_slot()
        emptied = [*self._lists, *(self._slots[name] for name in self._emptied.get(node.name, ()))]
        self._lists.clear()
        self._step(function, slots, named, slot, tuple(emptied))

    def _function(self, node: Node) -> tuple[Callable[..., Any], Sequence[Value]]:
        if node.block is not None:
            own = len(node.args) - len(node.block.inputs)
            inner = Interpreter(node.block, self._resolve, self._device)
            settings = [to_torch(value, self._device) for value in node.args[:own]]
            return _block_function(node.op, settings, inner), node.args[own:]
        if node.op in SIZE_OPERATIONS:
            return size_function(node.op), node.args
        return (operator.getitem if node.op == ITEM else self._resolve(node.op)), node.args

    def _step(
        self, function: Any, slots: Sequence[int], named: Mapping[str, int], slot: int, emptied: tuple[int, ...]
    ) -> None:
        single = slots[0] if len(slots) == 1 else -1
        pick = None if single >= 0 else (operator.itemgetter(*slots) if slots else _nothing)
        self._steps.append((function, pick, single, _named_values(named) if named else None, slot, emptied))


def _nothing(values: list[Any]) -> tuple[Any, ...]:
    return ()


def _as_list(*items: Any) -> list[Any]:
    return list(items)


def _named_values(named: Mapping[str, int]) -> Callable[[list[Any]], dict[str, Any]]:
    pairs = tuple(named.items())
    return lambda values: {name: values[slot] for name, slot in pairs}


def _block_function(op: str, settings: Sequence[Any], inner: Interpreter) -> Callable[..., Any]:
    def run(*inputs: Any) -> list[Any]:
        with _context(op, settings):
            return inner(inputs)

    return run


def _context(op: str, settings: Sequence[Any]) -> AbstractContextManager[Any]:
    if op == SET_GRAD:
        return torch.set_grad_enabled(settings[0])
    device, dtype, enabled, cached = settings
    return torch.autocast(device.type, dtype, enabled, cached)


def _last_uses(block: GraphBlock) -> dict[str, list[str]]:
    """Return the names whose values are not used after a node, by node."""
    last: dict[str, str] = {}
    for node in block.nodes:
        last[node.name] = node.name
        for name in references((*node.args, *node.kwargs.values())):
            last[name] = node.name
    for name in references(block.outputs):
        last.pop(name, None)
    found: dict[str, list[str]] = {}
    for name, node_name in last.items():
        found.setdefault(node_name, []).append(name)
    return found
