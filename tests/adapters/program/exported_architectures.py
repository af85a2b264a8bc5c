"""Architectures exported once: both dialects, and what torch itself makes of the decomposed graph."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from holdfast import Program
from holdfast.adapters.program.export_program import program_of
from holdfast.program.graph import Node
from tests.adapters.program.architectures import ARCHITECTURES, NOT_DECOMPOSED


@dataclass(frozen=True)
class Exported:
    """One architecture: `core` and `torch_core` are None where torch cannot decompose the graph."""

    name: str
    model: nn.Module
    example: dict[str, Any]
    other: Any
    training: Program
    core: Program | None
    torch_core: ExportedProgram | None

    def program(self, dialect: str) -> Program | None:
        return self.training if dialect == "training" else self.core


def export_architecture(name: str) -> Exported:
    """Export an architecture in both dialects, in core aten unless torch is known to fail."""
    torch.manual_seed(0)
    model, example, other, sizes = ARCHITECTURES[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(model, (), example, dynamic_shapes=sizes, strict=False)
        core = None if name in NOT_DECOMPOSED else exported.run_decompositions()
    training = program_of(exported, model, sizes)
    return Exported(
        name, model, example, other, training, None if core is None else program_of(exported, model, sizes, core), core
    )


@dataclass(frozen=True, slots=True)
class OriginCounts:
    """How many operators a program has, and how many of them have each part of an origin.

    `renamed` counts the operators that come from another one, as `aten.addmm` from `aten.linear`.
    """

    operators: int
    modules: int
    lines: int
    composites: int
    renamed: int


def count_origins(exported: Exported, dialect: str) -> OriginCounts:
    """Count origins that hold: a known module, a file and line, a composite that the program before has there."""
    program = exported.program(dialect)
    assert program is not None
    operators = [node for node in program.walk() if is_operator(node)]
    before = {(node.name, node.op, node.origin.module) for node in exported.training.walk()}
    composites = [(node, node.origin.composite) for node in operators if node.origin.composite is not None]
    held = [(node, composite[1]) for node, composite in composites if (*composite, node.origin.module) in before]
    return OriginCounts(
        operators=len(operators),
        modules=sum(_has_module(node, program, exported.model) for node in operators),
        lines=sum(node.origin.line.rpartition(":")[2].isdigit() for node in operators),
        composites=len(held),
        renamed=sum(op != node.op for node, op in held),
    )


def is_operator(node: Node) -> bool:
    """Return True for operators on tensors: torch adds operations on sizes without an origin."""
    return node.op.startswith("aten.") and not node.op.startswith("aten.sym_")


def _has_module(node: Node, program: Program, model: nn.Module) -> bool:
    """Return True if the path is one of the program's; it is empty only for lines of the model's own forward."""
    if node.origin.module:
        return node.origin.module in program.modules
    forward = inspect.unwrap(type(model).forward)
    lines, first = inspect.getsourcelines(forward)
    file, _, number = node.origin.line.rpartition(":")
    return (inspect.getsourcefile(forward) or "").endswith(file) and first <= int(number) < first + len(lines)
